from __future__ import annotations

import json

import pytest

from pdserve.v1 import errors
from pdserve.v1.errors import InvalidArgument, PdserveError, ResourceExhausted, Unavailable
from router.http.errors import TABLE, error_body, error_response


def test_every_error_of_ours_has_its_line() -> None:
    kinds = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, PdserveError) and kind is not PdserveError
    }
    assert set(TABLE) == kinds


def test_what_may_be_asked_again_says_when() -> None:
    for kind, row in TABLE.items():
        response = error_response(kind("x: y"))
        assert response.status_code == row.status
        assert ("retry-after" in response.headers) == row.can_retry
        assert response.headers["x-should-retry"] == ("true" if row.can_retry else "false")
    full = error_response(ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_s=1.25))
    assert (full.headers["retry-after"], full.headers["retry-after-ms"]) == ("2", "1250")
    soon = error_response(Unavailable("x", retry_after_s=0.0))
    assert (soon.headers["retry-after"], soon.headers["retry-after-ms"]) == ("1", "1")


PARAMS = {
    "max_tokens: 0 is below 1": "max_tokens",
    "n: 0 is not in 1..16": "n",
    "the body is no JSON: nothing": None,
}


@pytest.mark.parametrize("message", PARAMS)
def test_the_field_that_a_message_names_is_the_param(message: str) -> None:
    body = error_body(InvalidArgument(message))
    assert json.loads(json.dumps(body))["error"]["param"] == PARAMS[message]


def test_only_a_clients_mistake_has_a_param() -> None:
    error = error_body(Unavailable("worker: is gone"))["error"]
    assert isinstance(error, dict)
    assert error["param"] is None
