"""What a client may ask: OpenAI's fields and vLLM's extensions, and which GenerateRequests that makes.

Unknown keys are ignored, as OpenAI-compatible servers do. What is known and not served is refused by name:
an answer that silently lacks what was asked for is worse than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument, Unimplemented
from router.front.checks import CONTEXT_LENGTH_EXCEEDED
from router.http.fields import (
    MAX_PROMPTS,
    Int32,
    Items,
    LogitBias,
    Messages,
    Name,
    Parts,
    Prompt,
    RequestId,
    Seed,
    StopString,
    StopStrings,
    StopTokenIds,
)
from router.http.structured import StructuredFields, structured_output

# What OpenAI gives where a text completion names no limit.
DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: bool = False
    # vLLM's: the usage so far in every chunk.
    continuous_usage_stats: bool = False


class SamplingFields(StructuredFields):
    """What both kinds of request have."""

    model: Name = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None

    # vLLM's extensions.
    request_id: RequestId = ""
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool = False
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Known, and not served.
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    use_beam_search: bool = False
    truncate_prompt_tokens: int | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Items[int] | None = None


class CompletionRequest(SamplingFields):
    prompt: Prompt
    max_tokens: Int32 | None = DEFAULT_COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, lt=2**32)] | None = None

    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    prompt_embeds: object = None


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str
    text: str = ""


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    role: str
    content: str | Parts[ContentPart] | None = None
    tool_calls: object = None


class ChatCompletionRequest(SamplingFields):
    messages: Messages[ChatMessage]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    add_generation_prompt: bool = True

    tools: list[object] | None = None
    tool_choice: object = None
    functions: list[object] | None = None
    function_call: object = None
    modalities: Items[str] | None = None
    audio: object = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None


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


def completion_call(
    asked: CompletionRequest, request_id: str, max_prompts: int = MAX_PROMPTS, max_tokens: int | None = None
) -> Call:
    """Raises InvalidArgument or Unimplemented. `max_tokens`: the longest prompt in token ids; None: any."""
    prompts = _prompts(asked.prompt)
    _check_prompts(prompts, max_prompts, max_tokens)
    _refuse_unserved(asked)
    _refuse("echo", asked.echo)
    _refuse("suffix", bool(asked.suffix))
    _refuse("best_of", asked.best_of is not None and asked.best_of != (asked.n or 1))
    _refuse("prompt_embeds", asked.prompt_embeds is not None)
    common = _common(asked, request_id, asked.max_tokens, asked.logprobs)
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
    return Call(request_id, messages, _n(asked), _style(asked, asked.logprobs))


def chat_call(asked: ChatCompletionRequest, request_id: str) -> Call:
    """Raises InvalidArgument or Unimplemented."""
    _refuse_unserved(asked)
    _refuse("tools", bool(asked.tools) and asked.tool_choice != "none")
    _refuse("functions", bool(asked.functions) and asked.function_call != "none")
    _refuse("modalities", asked.modalities not in (None, ["text"]))
    _refuse("audio", asked.audio is not None)
    _refuse("continue_final_message", asked.continue_final_message)
    _refuse("chat_template", asked.chat_template is not None)
    _refuse("chat_template_kwargs", bool(asked.chat_template_kwargs))
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidArgument("top_logprobs: needs logprobs to be true")
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    message = _common(asked, request_id, limit, logprobs)
    message.chat.add_generation_prompt = asked.add_generation_prompt
    for each in asked.messages:
        _refuse("messages", bool(each.tool_calls), "tool calls")
        message.chat.messages.add(role=each.role, content=_text_of(each.content))
    return Call(request_id, (message,), _n(asked), _style(asked, logprobs))


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
    asked: SamplingFields, request_id: str, max_tokens: int | None, logprobs: int | None
) -> generation_pb2.GenerateRequest:
    message = generation_pb2.GenerateRequest(
        request_id=request_id,
        model=asked.model,
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
            structured=structured_output(asked),
        ),
        stop=generation_pb2.StopConditions(
            max_tokens=max_tokens,
            min_tokens=asked.min_tokens or 0,
            stop=[asked.stop] if isinstance(asked.stop, str) else asked.stop,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=asked.ignore_eos,
            include_stop_in_output=asked.include_stop_str_in_output,
        ),
    )
    if logprobs is not None:
        message.output.logprobs = logprobs
    return message


def _seed(seed: int | None) -> int | None:
    """-1 is vLLM's "none"; other negative ones are taken by their 64 bits."""
    return None if seed is None or seed == -1 else seed % 2**64


def _style(asked: SamplingFields, logprobs: int | None) -> Style:
    options = asked.stream_options or StreamOptions()
    if asked.stream_options is not None and not asked.stream:
        raise InvalidArgument("stream_options: needs stream to be true")
    return Style(
        stream=asked.stream,
        include_usage=options.include_usage,
        continuous_usage=options.include_usage and options.continuous_usage_stats,
        logprobs=logprobs,
        token_ids=bool(asked.return_token_ids),
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
    )


def _n(asked: SamplingFields) -> int:
    return 1 if asked.n is None else asked.n


def _refuse_unserved(asked: SamplingFields) -> None:
    _refuse("prompt_logprobs", asked.prompt_logprobs is not None)
    _refuse("skip_special_tokens", not asked.skip_special_tokens, "false")
    _refuse("use_beam_search", asked.use_beam_search)
    _refuse("truncate_prompt_tokens", asked.truncate_prompt_tokens is not None)
    _refuse("bad_words", bool(asked.bad_words))
    _refuse("allowed_token_ids", asked.allowed_token_ids is not None)


def _refuse(field: str, is_asked: bool, what: str = "") -> None:
    if is_asked:
        raise Unimplemented(f"{field}: {what + ' ' if what else ''}is not supported here")
