"""A body that is wrong in a million places is refused as cheaply as one that is wrong in one."""

from __future__ import annotations

import json
import sys
from types import FrameType

import pytest
from pydantic import BaseModel, ValidationError

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument
from router.front.checks import MAX_GRAMMAR_BYTES, MAX_LOGIT_BIASES
from router.http import calls
from router.http.calls import completion_call
from router.http.requests import ChatCompletionRequest, CompletionRequest
from router.http.size import MAX_NESTED, MAX_VALUES, check_size

MANY = 5000
# Branches of a union that each tell their first error.
FEW = 8

WRONG: dict[str, tuple[type[BaseModel], dict[str, object]]] = {
    "prompt": (CompletionRequest, {"prompt": [{}] * MANY}),
    "prompts": (CompletionRequest, {"prompt": [[None] * MANY] * 2}),
    "stop": (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
    "stop_token_ids": (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * MANY}),
    "logit_bias": (CompletionRequest, {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(MANY)}}),
    "guided_choice": (CompletionRequest, {"prompt": "a", "guided_choice": [1] * MANY}),
    "bad_words": (CompletionRequest, {"prompt": "a", "bad_words": [1] * MANY}),
    "allowed_token_ids": (CompletionRequest, {"prompt": "a", "allowed_token_ids": ["x"] * MANY}),
    "modalities": (ChatCompletionRequest, {"messages": [], "modalities": [1] * MANY}),
    "messages": (ChatCompletionRequest, {"messages": [1] * MANY}),
    "content": (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_list_of_wrong_items_tells_its_first_error_only(name: str) -> None:
    kind, body = WRONG[name]
    with pytest.raises(ValidationError) as refused:
        kind.model_validate_json(json.dumps(body))
    assert refused.value.error_count() <= FEW


LONG: dict[str, object] = {
    "model": "m" * 2000,
    "request_id": "r" * 2000,
    "stop": ["a"] * 65,
    "stop_token_ids": [1] * 1025,
    "logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIASES + 1)},
    "guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1),
    "guided_json": "a" * (MAX_GRAMMAR_BYTES + 1),
    "guided_grammar": "a" * (MAX_GRAMMAR_BYTES + 1),
    "guided_choice": ["a"] * MAX_GRAMMAR_BYTES,
}


@pytest.mark.parametrize("name", LONG)
def test_what_every_prompt_would_copy_is_bounded_while_it_is_read(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        CompletionRequest.model_validate_json(json.dumps({"prompt": "a", name: LONG[name]}))


@pytest.mark.parametrize(
    "fields", [{"guided_choice": ["a" * 1000] * 100}, {"guided_json": {"enum": ["a"] * MAX_GRAMMAR_BYTES}}]
)
def test_a_constraint_that_is_too_large_is_refused_by_its_name(fields: dict[str, object]) -> None:
    asked = CompletionRequest.model_validate({"prompt": "a"} | fields)
    with pytest.raises(InvalidArgument, match=f"{next(iter(fields))}: at most"):
        completion_call(asked, "r")


def test_a_schema_that_is_large_and_deep_costs_no_step_of_python_for_each_part() -> None:
    """It is read on the event loop, and others' tokens wait."""
    deep = "[" * 150 + ",".join(["0"] * 20_000) + "]" * 150
    asked = CompletionRequest.model_validate_json(f'{{"prompt": "a", "guided_json": {{"enum": {deep}}}}}')
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        call = completion_call(asked, "r")
    finally:
        sys.setprofile(None)
    assert json.loads(call.messages[0].sampling.structured.json_schema) == asked.guided_json
    assert num_calls < 1000


@pytest.mark.parametrize("prompt", [["a"] * 5, [[1]] * 5, [1] * 10, [[1] * 10]])
def test_too_many_prompts_or_ids_are_refused_before_a_message_is_made(
    prompt: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "generation_pb2", None)
    asked = CompletionRequest.model_validate({"prompt": prompt})
    with pytest.raises(InvalidArgument, match=r"^prompt: "):
        completion_call(asked, "r", max_prompts=4, max_tokens=10)


def test_as_many_prompts_as_are_taken_are_taken() -> None:
    asked = CompletionRequest.model_validate({"prompt": [[1] * 9] * 4})
    messages = completion_call(asked, "r", max_prompts=4, max_tokens=10).messages
    assert all(isinstance(message, generation_pb2.GenerateRequest) for message in messages)
    assert len(messages) == 4


@pytest.mark.parametrize(
    "body",
    [b"[" + b"[]," * MAX_NESTED + b"1]", b"[" + b"1," * (MAX_VALUES + 1) + b"1]", b"{" * (MAX_NESTED + 1)],
)
async def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="too many parts"):
        await check_size(body)


async def test_brackets_and_commas_in_texts_do_not_count() -> None:
    text = r"\"[{," * (1 << 18) + r"\\"
    await check_size(b'{"prompt": "' + text.encode() + b'", "stop": ["a"]}')
    with pytest.raises(InvalidArgument, match="too many parts"):
        await check_size(b'{"prompt": "' + text.encode() + b'", "stop": ' + b"[" * (1 << 18))
