"""From what a client asked to GenerateRequests, and how their answer is to be written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument, Unimplemented
from router.front.checks import CONTEXT_LENGTH_EXCEEDED
from router.http.fields import MAX_PROMPTS, Prompt
from router.http.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    ContentPart,
    SamplingFields,
    StreamOptions,
)
from router.http.structured import Constraint, structured_output
from router.http.words import Words


@dataclass(frozen=True, slots=True)
class Style:
    """How the answer is to be written down."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    # How many of the likeliest tokens at each position, besides the chosen one. None: no logprobs.
    logprobs: int | None
    token_ids: bool
    # Names a token in logprobs by "token_id:7" and not by its text.
    tokens_as_ids: bool


@dataclass(frozen=True, slots=True)
class Call:
    request_id: str
    # One for each prompt.
    messages: Sequence[generation_pb2.GenerateRequest]
    # Sequences for each prompt.
    n: int
    style: Style
    words: Words


def completion_call(
    asked: CompletionRequest, request_id: str, max_prompts: int = MAX_PROMPTS, max_tokens: int | None = None
) -> Call:
    """Raises InvalidArgument or Unimplemented. `max_tokens`: the longest prompt in token ids; None: any."""
    prompts = _prompts(asked.prompt)
    _check_prompts(prompts, max_prompts, max_tokens)
    _refuse_unserved(asked)
    _refuse("echo", bool(asked.echo))
    _refuse("suffix", bool(asked.suffix))
    _refuse("best_of", asked.best_of is not None and asked.best_of != (asked.n or 1))
    _refuse("prompt_embeds", asked.prompt_embeds is not None)
    _refuse("add_special_tokens", asked.add_special_tokens is False, "false")
    constraint = structured_output(asked)
    common = _common(asked, request_id, constraint, asked.max_tokens, asked.logprobs)
    messages = []
    for prompt in prompts:
        message = generation_pb2.GenerateRequest()
        message.CopyFrom(common)
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.token_ids.ids.extend(prompt)
            message.token_ids.SetInParent()
        messages.append(message)
    words = Words("prompt", "max_tokens", "logprobs", _field_of(constraint))
    return Call(request_id, messages, _n(asked), _style(asked, asked.logprobs), words)


def chat_call(asked: ChatCompletionRequest, request_id: str) -> Call:
    """Raises InvalidArgument or Unimplemented."""
    _refuse_unserved(asked)
    _refuse("tools", bool(asked.tools) and asked.tool_choice != "none")
    _refuse("functions", bool(asked.functions) and asked.function_call != "none")
    _refuse("modalities", asked.modalities not in (None, ["text"]))
    _refuse("audio", asked.audio is not None)
    _refuse("continue_final_message", bool(asked.continue_final_message))
    _refuse("echo", bool(asked.echo))
    _refuse("add_special_tokens", bool(asked.add_special_tokens), "true")
    _refuse("documents", asked.documents is not None)
    _refuse("chat_template", asked.chat_template is not None)
    _refuse("chat_template_kwargs", bool(asked.chat_template_kwargs))
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidArgument("top_logprobs: needs logprobs to be true")
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    has_newer_limit = asked.max_completion_tokens is not None
    limit = asked.max_completion_tokens if has_newer_limit else asked.max_tokens
    constraint = structured_output(asked)
    message = _common(asked, request_id, constraint, limit, logprobs)
    message.chat.add_generation_prompt = asked.add_generation_prompt is not False
    for each in asked.messages:
        _refuse("messages", bool(each.tool_calls), "tool calls")
        message.chat.messages.add(role=each.role, content=_text_of(each.content))
    limit_name = "max_completion_tokens" if has_newer_limit else "max_tokens"
    words = Words("messages", limit_name, "top_logprobs", _field_of(constraint))
    return Call(request_id, (message,), _n(asked), _style(asked, logprobs), words)


def _prompts(prompt: Prompt) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return (prompt,)
    texts_or_lists = [each for each in prompt if not isinstance(each, int)]
    # A list of numbers is one prompt; so is an empty one, which is refused as such.
    return texts_or_lists or ([each for each in prompt if isinstance(each, int)],)


def _check_prompts(prompts: Sequence[str | list[int]], max_prompts: int, max_tokens: int | None) -> None:
    """Before a message is made for each, with a copy of all that they share."""
    if len(prompts) > max_prompts:
        raise InvalidArgument(f"prompt: {len(prompts)} of them at once, at most {max_prompts} are taken")
    longest = max((len(prompt) for prompt in prompts if not isinstance(prompt, str)), default=0)
    if max_tokens is not None and longest >= max_tokens:
        raise InvalidArgument(
            f"prompt: {longest} tokens leave no room in {max_tokens}", reason=CONTEXT_LENGTH_EXCEEDED
        )


def _text_of(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    _refuse("messages", any(part.type != "text" for part in content), "content other than text")
    return "\n".join(part.text for part in content)


def _common(
    asked: SamplingFields,
    request_id: str,
    constraint: Constraint | None,
    max_tokens: int | None,
    logprobs: int | None,
) -> generation_pb2.GenerateRequest:
    message = generation_pb2.GenerateRequest(
        request_id=request_id,
        model=asked.model or "",
        n=asked.n,
        sampling=generation_pb2.SamplingParams(
            temperature=asked.temperature,
            # Off is 0 here, and -1 with some.
            top_k=max(0, asked.top_k or 0),
            top_p=asked.top_p,
            min_p=asked.min_p or 0.0,
            seed=_seed(asked.seed),
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            logit_bias=asked.logit_bias,
            structured=constraint.message if constraint is not None else None,
        ),
        stop=generation_pb2.StopConditions(
            max_tokens=max_tokens,
            min_tokens=asked.min_tokens or 0,
            stop=[asked.stop] if isinstance(asked.stop, str) else asked.stop,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=bool(asked.ignore_eos),
            include_stop_in_output=bool(asked.include_stop_str_in_output),
        ),
    )
    if logprobs is not None:
        message.output.logprobs = logprobs
    return message


def _field_of(constraint: Constraint | None) -> str:
    return constraint.field if constraint is not None else "response_format"


def _seed(seed: int | None) -> int | None:
    """-1 is vLLM's "none"; other negative ones are taken by their 64 bits."""
    return None if seed is None or seed == -1 else seed % 2**64


def _style(asked: SamplingFields, logprobs: int | None) -> Style:
    options = asked.stream_options or StreamOptions()
    if asked.stream_options is not None and not asked.stream:
        raise InvalidArgument("stream_options: needs stream to be true")
    return Style(
        stream=bool(asked.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        logprobs=logprobs,
        token_ids=bool(asked.return_token_ids),
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
    )


def _n(asked: SamplingFields) -> int:
    return 1 if asked.n is None else asked.n


def _refuse_unserved(asked: SamplingFields) -> None:
    _refuse("prompt_logprobs", asked.prompt_logprobs is not None)
    _refuse("skip_special_tokens", asked.skip_special_tokens is False, "false")
    _refuse("use_beam_search", bool(asked.use_beam_search))
    _refuse("truncate_prompt_tokens", asked.truncate_prompt_tokens is not None)
    _refuse("bad_words", bool(asked.bad_words))
    _refuse("allowed_token_ids", asked.allowed_token_ids is not None)
    _refuse("cache_salt", asked.cache_salt is not None)
    _refuse("logits_processors", asked.logits_processors is not None)


def _refuse(field: str, is_asked: bool, what: str = "") -> None:
    if is_asked:
        raise Unimplemented(f"{field}: {what + ' ' if what else ''}is not supported here")
