"""An error names the field that the client sent, under the client's name."""

from __future__ import annotations

import pytest

from pdserve.v1.errors import InvalidArgument, NotFound, PdserveError, Unavailable, Unimplemented
from router.front.checks import RequestBounds, check_request, resolve_max_tokens
from router.http.calls import Call, chat_call, completion_call
from router.http.errors import error_body
from router.http.requests import ChatCompletionRequest, CompletionRequest
from router.http.words import Words

BOUNDS = RequestBounds("tiny", 512, frozenset({508}), max_prompt_bytes=4096, max_n=16)
WORDS = Words("messages", "max_completion_tokens", "top_logprobs", "guided_regex")
HI = [{"role": "user", "content": "hi"}]
# More bytes than a prompt or a grammar may have, though a grammar may have as many characters.
LARGE = "\u00e9" * 40_000

# What is sent to both APIs beside the prompt, and the field that the error is about.
COMMON: list[tuple[dict[str, object], str]] = [
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"min_p": 2.0}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"presence_penalty": 3.0}, "presence_penalty"),
    ({"frequency_penalty": -3.0}, "frequency_penalty"),
    ({"logit_bias": {"600": 1}}, "logit_bias"),
    ({"n": 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"guided_regex": LARGE}, "guided_regex"),
    ({"guided_json": LARGE}, "guided_json"),
    ({"guided_grammar": f"start: {LARGE}"}, "guided_grammar"),
    ({"structured_outputs": {"regex": LARGE}}, "structured_outputs"),
]
COMPLETIONS: list[tuple[dict[str, object], str]] = [
    *COMMON,
    ({"prompt": ""}, "prompt"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": LARGE}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
]
CHATS: list[tuple[dict[str, object], str]] = [
    *COMMON,
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": LARGE}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    # The newer one is the one that counts.
    ({"max_completion_tokens": 5000, "max_tokens": 1}, "max_completion_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
]


def refusal(call: Call) -> PdserveError:
    """As the router's own checks refuse it, in the client's words."""

    def check() -> None:
        for message in call.messages:
            check_request(message, BOUNDS)
            resolve_max_tokens(message.stop, num_prompt_tokens=10, max_sequence_tokens=2048)

    with pytest.raises(PdserveError) as refused, call.words.spoken():
        check()
    return refused.value


def check_names(error: PdserveError, field: str, fields: set[str]) -> None:
    body = error_body(error)["error"]
    assert isinstance(body, dict)
    assert body["param"] == field
    assert field in fields
    assert error.message.startswith(f"{field}: ")
    assert not any(f"{section}." in error.message for section in ("prompt", "sampling", "stop", "output"))


@pytest.mark.parametrize(("sent", "field"), COMPLETIONS)
def test_a_completions_error_names_what_was_sent(sent: dict[str, object], field: str) -> None:
    call = completion_call(CompletionRequest.model_validate({"prompt": "x"} | sent), "r")
    check_names(refusal(call), field, set(CompletionRequest.model_fields))


@pytest.mark.parametrize(("sent", "field"), CHATS)
def test_a_chats_error_names_what_was_sent(sent: dict[str, object], field: str) -> None:
    call = chat_call(ChatCompletionRequest.model_validate({"messages": HI} | sent), "r")
    check_names(refusal(call), field, set(ChatCompletionRequest.model_fields))


def test_the_limit_has_its_name_within_the_message_too() -> None:
    call = chat_call(ChatCompletionRequest(messages=HI, max_completion_tokens=4, min_tokens=5), "r")
    assert refusal(call).message == "min_tokens: 5 is over max_completion_tokens (4)"


def test_an_answer_constrained_twice_is_told_by_which_two_fields() -> None:
    both = ChatCompletionRequest.model_validate(
        {"messages": HI, "guided_json": {"type": "object"}, "guided_regex": "a"}
    )
    with pytest.raises(InvalidArgument, match=r"^guided_regex: .*, by guided_json and guided_regex$"):
        chat_call(both, "r")
    newer = {"messages": HI, "structured_outputs": {"regex": "a", "json_object": True}}
    with pytest.raises(InvalidArgument, match=r"^structured_outputs: .* more than one way$"):
        chat_call(ChatCompletionRequest.model_validate(newer), "r")


def test_a_new_name_changes_nothing_else_of_an_error() -> None:
    error = InvalidArgument("stop.max_tokens: 9 is too many", reason="CONTEXT_LENGTH_EXCEEDED")
    said = WORDS.of(error)
    assert isinstance(said, InvalidArgument)
    assert (said.message, said.reason) == ("max_completion_tokens: 9 is too many", error.reason)
    unserved = WORDS.of(Unimplemented("sampling.structured: not with this model: stop.stop: x"))
    assert unserved.message == "guided_regex: not with this model: stop.stop: x"


@pytest.mark.parametrize("error", [Unavailable("prompt.text: x"), NotFound("sampling.n: x")])
def test_what_is_no_mistake_in_a_field_stays_as_it_is(error: PdserveError) -> None:
    with pytest.raises(PdserveError) as raised, WORDS.spoken():
        raise error
    assert raised.value is error
