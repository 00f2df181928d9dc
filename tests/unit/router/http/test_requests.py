"""From OpenAI's and vLLM's fields to our own message."""

from __future__ import annotations

import json
import re

import pytest

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument, Unimplemented
from router.http.calls import chat_call, completion_call
from router.http.requests import ChatCompletionRequest, CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
Message = generation_pb2.GenerateRequest


def completion(**fields: object) -> Message:
    call = completion_call(CompletionRequest.model_validate({"prompt": "x"} | fields), "r")
    (message,) = call.messages
    return message


def chat(**fields: object) -> Message:
    (message,) = chat_call(ChatCompletionRequest.model_validate(CHAT | fields), "r").messages
    return message


def test_a_plain_request_sets_nothing_but_its_limit() -> None:
    message = completion()
    assert message == Message(
        request_id="r",
        text="x",
        sampling=generation_pb2.SamplingParams(),
        stop=generation_pb2.StopConditions(max_tokens=16),
    )
    assert not chat().stop.HasField("max_tokens")
    assert not completion(max_tokens=None).stop.HasField("max_tokens")


def test_every_knob_lands_in_its_field() -> None:
    message = completion(
        model="m",
        n=2,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=9,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"3": -100},
        max_tokens=8,
        min_tokens=2,
        stop="a",
        stop_token_ids=[4],
        ignore_eos=True,
        include_stop_str_in_output=True,
        logprobs=3,
    )
    assert message == Message(
        request_id="r",
        model="m",
        text="x",
        n=2,
        sampling=generation_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            seed=9,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={3: -100},
        ),
        stop=generation_pb2.StopConditions(
            max_tokens=8,
            min_tokens=2,
            stop=["a"],
            stop_token_ids=[4],
            ignore_eos=True,
            include_stop_in_output=True,
        ),
        output=generation_pb2.OutputOptions(logprobs=3),
    )


def test_what_is_off_with_others_is_off_here() -> None:
    message = completion(top_k=-1, seed=-1, presence_penalty=None, stop=None, user="me", no_such_key=1)
    assert message == completion()
    assert completion(seed=-2).sampling.seed == 2**64 - 2
    assert chat(tools=[], tool_choice="none", logprobs=False) == chat()


def test_null_is_as_good_as_left_out() -> None:
    def nulls(kind: type[CompletionRequest] | type[ChatCompletionRequest]) -> dict[str, object]:
        fields = kind.model_fields.items()
        return {info.alias or name: None for name, info in fields if not info.is_required()}

    assert completion(**nulls(CompletionRequest)) == completion(max_tokens=None)
    assert chat(**nulls(ChatCompletionRequest)) == chat()
    options = {"include_usage": None, "continuous_usage_stats": None}
    asked = CompletionRequest.model_validate({"prompt": "x", "stream": True, "stream_options": options})
    assert not completion_call(asked, "r").style.include_usage


def test_prompts_of_all_four_kinds() -> None:
    def kinds(prompt: object) -> list[str | list[int]]:
        call = completion_call(CompletionRequest.model_validate({"prompt": prompt}), "r")
        return [each.text or list(each.token_ids.ids) for each in call.messages]

    assert kinds("a") == ["a"]
    assert kinds(["a", "b"]) == ["a", "b"]
    assert kinds([1, 2]) == [[1, 2]]
    assert kinds([[1], [2, 3]]) == [[1], [2, 3]]
    assert kinds([]) == [[]]


def test_a_chats_limit_and_content_come_in_two_ways() -> None:
    assert chat(max_completion_tokens=3, max_tokens=5).stop.max_tokens == 3
    assert chat(max_tokens=5).stop.max_tokens == 5
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = chat(messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None}])
    assert [each.content for each in message.chat.messages] == ["a\nb", ""]
    assert chat(logprobs=True).output.logprobs == 0
    assert chat(logprobs=True).output.HasField("logprobs")
    assert chat(logprobs=True, top_logprobs=4).output.logprobs == 4


UNSERVED: dict[str, dict[str, object]] = {
    "tools": {"tools": [{"type": "function"}]},
    "functions": {"functions": [{"name": "f"}]},
    "modalities": {"modalities": ["text", "audio"]},
    "audio": {"audio": {"voice": "x"}},
    "continue_final_message": {"continue_final_message": True},
    "chat_template": {"chat_template": "{{ messages }}"},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "skip_special_tokens": {"skip_special_tokens": False},
    "use_beam_search": {"use_beam_search": True},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
    "bad_words": {"bad_words": ["x"]},
    "allowed_token_ids": {"allowed_token_ids": [1]},
    "cache_salt": {"cache_salt": "secret"},
    "logits_processors": {"logits_processors": ["x"]},
    "echo": {"echo": True},
    "add_special_tokens": {"add_special_tokens": True},
    "documents": {"documents": [{"title": "t", "text": "x"}]},
}


@pytest.mark.parametrize("field", UNSERVED)
def test_what_is_known_and_not_served_is_refused_by_name(field: str) -> None:
    with pytest.raises(Unimplemented, match=f"^{field}: "):
        chat(**UNSERVED[field])


@pytest.mark.parametrize(
    "fields",
    [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"prompt_embeds": "x"}, {"add_special_tokens": False}],
)
def test_so_is_a_completions_own(fields: dict[str, object]) -> None:
    with pytest.raises(Unimplemented, match=f"^{next(iter(fields))}: "):
        completion(**fields)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CONSTRAINED: dict[str, tuple[dict[str, object], str, str]] = {
    "OpenAI's schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        "json_schema",
        json.dumps(SCHEMA),
    ),
    "any object": ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
    "guided_json": ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
    "guided_regex": ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
    "guided_grammar": ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
    "structured regex": ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
    "structured grammar": ({"structured_outputs": {"grammar": "g"}}, "grammar", "g"),
    "guided_grammar in GBNF": (
        {"guided_grammar": 'root ::= "a" | b\nb ::= [0-9]+'},
        "grammar",
        '%llguidance {}\n\nstart: "a"\n     | B\n\nB: /[0-9]/+\n',
    ),
    "structured object": (
        {"structured_outputs": {"json_object": True}},
        "json_schema",
        '{"type": "object"}',
    ),
}


@pytest.mark.parametrize("name", CONSTRAINED)
def test_each_way_to_constrain_an_answer_is_one_of_ours(name: str) -> None:
    fields, kind, value = CONSTRAINED[name]
    structured = chat(**fields).sampling.structured
    assert structured.WhichOneof("constraint") == kind
    assert getattr(structured, kind) == value


def test_a_choice_is_a_regex_of_the_choices_as_they_are() -> None:
    for fields in ({"guided_choice": ["a.b", "c"]}, {"structured_outputs": {"choice": ["a.b", "c"]}}):
        regex = re.compile(chat(**fields).sampling.structured.regex)
        assert regex.fullmatch("a.b")
        assert regex.fullmatch("c")
        assert not regex.fullmatch("axb")


def test_two_constraints_none_and_an_empty_one() -> None:
    assert not chat(response_format={"type": "text"}).sampling.HasField("structured")
    with pytest.raises(InvalidArgument, match="more than one way"):
        chat(guided_regex="a", guided_json=SCHEMA)
    with pytest.raises(InvalidArgument, match="no schema"):
        chat(response_format={"type": "json_schema"})
    with pytest.raises(InvalidArgument, match="nothing to choose"):
        chat(guided_choice=[])


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "structural_tag"}}, {"structured_outputs": {"structural_tag": "{}"}}],
)
def test_structural_tags_are_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(Unimplemented, match="structural tags"):
        chat(**fields)


@pytest.mark.parametrize(
    "grammar",
    ["root ::= nowhere", "root ::= (", "root ::= " + "(" * 5000, "root ::= " + '"a" ' * 5000, "a ::= 1"],
)
def test_gbnf_that_is_none_is_a_bad_argument(grammar: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^guided_grammar: "):
        chat(guided_grammar=grammar)


def test_lark_may_hold_the_sign_of_gbnf() -> None:
    lark = 'start: "x" " ::= " /[a-z]+/'
    assert chat(guided_grammar=lark).sampling.structured.grammar == lark
