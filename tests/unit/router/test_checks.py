from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument, NotFound, Unimplemented
from router.front.checks import RequestBounds, check_request, resolve_max_tokens

BOUNDS = RequestBounds("tiny", vocab_size=512, eos_token_ids=frozenset({508}), max_prompt_bytes=1000, max_n=4)
Message = generation_pb2.GenerateRequest


def good() -> Message:
    return Message(text="hello")


def test_a_plain_request_passes() -> None:
    check_request(good(), BOUNDS)
    check_request(Message(token_ids=generation_pb2.TokenIds(ids=[0, 511]), model="tiny", n=4), BOUNDS)


def spoil(path: str, value: object) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        *homes, name = path.split(".")
        place: object = message
        for home in homes:
            place = getattr(place, home)
        setattr(place, name, value)

    return change


def no_prompt(message: Message) -> None:
    message.ClearField("text")


def ids(*values: int) -> Callable[[Message], None]:
    return lambda message: message.token_ids.CopyFrom(generation_pb2.TokenIds(ids=values))


def chat(*messages: tuple[str, str]) -> Callable[[Message], None]:
    made = [generation_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return lambda message: message.chat.CopyFrom(generation_pb2.Chat(messages=made))


def ban_all(message: Message) -> None:
    message.stop.min_tokens = 1
    message.stop.stop_token_ids.extend(set(range(512)) - BOUNDS.eos_token_ids)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (no_prompt, "prompt"),
        (spoil("text", ""), "prompt.text"),
        (spoil("text", "x" * 1001), "prompt.text"),
        (ids(), "prompt.token_ids"),
        (ids(5, 512), "prompt.token_ids"),
        (ids(*[1] * 251), "prompt.token_ids"),
        (chat(), "prompt.chat"),
        (chat(("", "hi")), "prompt.chat"),
        (chat(("user", "é" * 600)), "prompt.chat"),
        (chat(*[("a", "")] * 4097), "prompt.chat"),
        (spoil("n", 0), "n"),
        (spoil("n", 5), "n"),
        (spoil("request_id", "x" * 1025), "request_id"),
        (spoil("stop.max_tokens", 0), "stop.max_tokens"),
        (spoil("stop.max_tokens", -1), "stop.max_tokens"),
        (spoil("stop.min_tokens", -1), "stop.min_tokens"),
        (spoil("stop.min_tokens", 257), "stop.min_tokens"),
        (lambda message: message.stop.stop.append(""), "stop.stop"),
        (lambda message: message.stop.stop.extend(["x"] * 65), "stop.stop"),
        (lambda message: message.stop.stop.append("é" * 513), "stop.stop"),
        (lambda message: message.stop.stop_token_ids.extend([1] * 1025), "stop.stop_token_ids"),
        (lambda message: message.stop.stop_token_ids.append(512), "stop.stop_token_ids"),
        (spoil("sampling.temperature", math.nan), "sampling.temperature"),
        (spoil("sampling.temperature", math.inf), "sampling.temperature"),
        (spoil("sampling.temperature", -0.1), "sampling.temperature"),
        (spoil("sampling.top_p", 2.0), "sampling.top_p"),
        (spoil("sampling.top_p", 0.0), "sampling.top_p"),
        (spoil("sampling.top_k", -1), "sampling.top_k"),
        (spoil("sampling.min_p", 1.5), "sampling.min_p"),
        (spoil("sampling.repetition_penalty", 0.0), "sampling.repetition_penalty"),
        (spoil("sampling.repetition_penalty", 1e-38), "sampling.repetition_penalty"),
        (spoil("sampling.repetition_penalty", 3e38), "sampling.repetition_penalty"),
        (spoil("sampling.presence_penalty", 3.0), "sampling.presence_penalty"),
        (spoil("sampling.frequency_penalty", math.nan), "sampling.frequency_penalty"),
        (lambda message: message.sampling.logit_bias.update({512: 1.0}), "sampling.logit_bias"),
        (lambda message: message.sampling.logit_bias.update({1: math.nan}), "sampling.logit_bias"),
        (lambda message: message.sampling.logit_bias.update({1: 3e38}), "sampling.logit_bias"),
        (lambda message: message.sampling.structured.SetInParent(), "sampling.structured"),
        (spoil("sampling.structured.json_schema", ""), "sampling.structured"),
        (spoil("sampling.structured.regex", "é" * 32769), "sampling.structured"),
        (ban_all, "stop.stop_token_ids"),
        (spoil("output.logprobs", 21), "output.logprobs"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(
    change: Callable[[Message], None], names: str
) -> None:
    message = good()
    change(message)
    with pytest.raises(InvalidArgument, match=rf"^{names}: "):
        check_request(message, BOUNDS)


def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFound, match="other"):
        check_request(Message(text="x", model="other"), BOUNDS)


def test_fields_without_code_behind_them_are_unimplemented() -> None:
    message = good()
    message.output.prompt_logprobs = True
    with pytest.raises(Unimplemented):
        check_request(message, BOUNDS)


@pytest.mark.parametrize(
    ("asked", "prompt", "limit", "resolved"),
    [
        (10, 90, 100, 10),
        (11, 90, 100, None),
        (1, 100, 100, None),
        (None, 90, 100, 10),
        (None, 99, 100, 1),
        (None, 100, 100, None),
        (None, 10, 1000, 256),
    ],
)
def test_prompt_and_output_must_fit(asked: int | None, prompt: int, limit: int, resolved: int | None) -> None:
    stop = generation_pb2.StopConditions(max_tokens=asked)
    if resolved is None:
        with pytest.raises(InvalidArgument):
            resolve_max_tokens(stop, prompt, limit)
    else:
        assert resolve_max_tokens(stop, prompt, limit) == resolved
