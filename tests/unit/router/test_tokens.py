"""What the router makes of a token that a worker sends."""

from __future__ import annotations

import pytest

from pdserve.v1 import generation_pb2, worker_pb2
from pdserve.v1.errors import Unavailable
from router.tokens import token_of


@pytest.mark.parametrize("reason", generation_pb2.FinishReason.values())
def test_a_token_says_how_it_ends_its_sequence_or_nothing(reason: generation_pb2.FinishReason) -> None:
    assert token_of(worker_pb2.TokenOutput(finish_reason=reason)).finish_reason == (reason or None)


def test_an_end_that_there_is_not_is_the_workers_fault_and_no_end() -> None:
    with pytest.raises(Unavailable):
        token_of(worker_pb2.TokenOutput(finish_reason=99))  # type: ignore[arg-type]
