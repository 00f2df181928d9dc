"""Is this request one that can be answered at all? Every refusal names its field.

Pure: looks at the message, the model's facts and the settings, computes nothing that grows with a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument, NotFound, Unimplemented

DEFAULT_MAX_TOKENS = 256
MAX_REQUEST_ID_BYTES = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_CHAT_MESSAGES = 4096
# Of a schema, regular expression or grammar.
MAX_GRAMMAR_BYTES = 1 << 16
# Beyond these float32 scores overflow, and there is nothing left to draw.
MAX_LOGIT_BIAS = 1e9
REPETITION_PENALTIES = (0.001, 1000.0)
# A reason by its own name: clients shorten a conversation when they see it.
CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"


@dataclass(frozen=True, slots=True)
class RequestBounds:
    model: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_prompt_bytes: int
    max_n: int


def check_request(
    message: generation_pb2.GenerateRequest,
    bounds: RequestBounds,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
) -> None:
    """Raises InvalidArgument, NotFound or Unimplemented."""
    _require(
        len(message.request_id.encode()) <= MAX_REQUEST_ID_BYTES,
        f"request_id: at most {MAX_REQUEST_ID_BYTES} bytes",
    )
    if message.model not in ("", bounds.model):
        raise NotFound(f"model {message.model!r} is not served here, {bounds.model!r} is", reason="MODEL")
    if message.HasField("n"):
        _require(1 <= message.n <= bounds.max_n, f"n: {message.n} is not in 1..{bounds.max_n}")
    _check_prompt(message, bounds)
    _check_sampling(message.sampling, bounds)
    _check_stop(message.stop, bounds, default_max_tokens)
    _check_output(message.output)


def _require(condition: bool, complaint: str, reason: str | None = None) -> None:
    if not condition:
        raise InvalidArgument(complaint, reason=reason)


def _check_prompt(message: generation_pb2.GenerateRequest, bounds: RequestBounds) -> None:
    which = message.WhichOneof("prompt")
    _require(which is not None, "prompt: there is none")
    if which == "text":
        _require(message.text != "", "prompt.text: is empty")
        _check_size("prompt.text", len(message.text.encode()), bounds)
    elif which == "token_ids":
        ids = message.token_ids.ids
        _require(len(ids) > 0, "prompt.token_ids: is empty")
        _check_size("prompt.token_ids", 4 * len(ids), bounds)
        _check_ids("prompt.token_ids", ids, bounds)
    else:
        messages = message.chat.messages
        _require(len(messages) > 0, "prompt.chat: has no messages")
        _require(len(messages) <= MAX_CHAT_MESSAGES, f"prompt.chat: over {MAX_CHAT_MESSAGES} messages")
        _require(all(each.role for each in messages), "prompt.chat: a message has no role")
        size = sum(len(each.role.encode()) + len(each.content.encode()) for each in messages)
        _check_size("prompt.chat", size, bounds)


def _check_size(name: str, num_bytes: int, bounds: RequestBounds) -> None:
    _require(
        num_bytes <= bounds.max_prompt_bytes,
        f"{name}: {num_bytes} bytes, at most {bounds.max_prompt_bytes} are taken",
        "PROMPT_TOO_LARGE",
    )


def _check_ids(name: str, ids: Iterable[int], bounds: RequestBounds) -> None:
    largest = max(ids, default=0)
    _require(
        largest < bounds.vocab_size, f"{name}: {largest} is outside the vocabulary of {bounds.vocab_size}"
    )


def _check_sampling(sampling: generation_pb2.SamplingParams, bounds: RequestBounds) -> None:
    if sampling.HasField("temperature"):
        _check_range("sampling.temperature", sampling.temperature, 0.0, math.inf)
    _require(sampling.top_k >= 0, f"sampling.top_k: {sampling.top_k} is negative (0 is off)")
    if sampling.HasField("top_p"):
        _check_range("sampling.top_p", sampling.top_p, 0.0, 1.0)
        _require(sampling.top_p > 0.0, "sampling.top_p: must be above 0")
    _check_range("sampling.min_p", sampling.min_p, 0.0, 1.0)
    if sampling.HasField("repetition_penalty"):
        _check_range("sampling.repetition_penalty", sampling.repetition_penalty, *REPETITION_PENALTIES)
    _check_range("sampling.presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("sampling.frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _require(len(sampling.logit_bias) <= MAX_LOGIT_BIASES, f"sampling.logit_bias: over {MAX_LOGIT_BIASES}")
    _check_ids("sampling.logit_bias", sampling.logit_bias, bounds)
    for bias in sampling.logit_bias.values():
        _check_range("sampling.logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if sampling.HasField("structured"):
        _check_structured(sampling.structured)


def _check_structured(structured: generation_pb2.StructuredOutput) -> None:
    """Its size; whether it can be honoured takes a compiler."""
    which = structured.WhichOneof("constraint")
    _require(which is not None, "sampling.structured: names no constraint")
    sizes = (structured.json_schema, structured.regex, structured.grammar)
    num_bytes = max(len(each.encode()) for each in sizes)
    _require(num_bytes > 0, "sampling.structured: is empty")
    _require(
        num_bytes <= MAX_GRAMMAR_BYTES,
        f"sampling.structured: {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are taken",
    )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    """Finite, and within [low, high]."""
    is_within = math.isfinite(value) and low <= value <= high
    _require(is_within, f"{name}: {value:g} is not a number in [{low:g}, {high:g}]")


def _check_stop(stop: generation_pb2.StopConditions, bounds: RequestBounds, default_max_tokens: int) -> None:
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else default_max_tokens
    _require(max_tokens >= 1, f"stop.max_tokens: {max_tokens} is below 1")
    _require(stop.min_tokens >= 0, f"stop.min_tokens: {stop.min_tokens} is negative")
    _require(
        stop.min_tokens <= max_tokens, f"stop.min_tokens: {stop.min_tokens} is over max_tokens ({max_tokens})"
    )
    _require(len(stop.stop) <= MAX_STOP_STRINGS, f"stop.stop: over {MAX_STOP_STRINGS} strings")
    _require(all(stop.stop), "stop.stop: an empty string would stop at once")
    is_short = all(len(string.encode()) <= MAX_STOP_STRING_BYTES for string in stop.stop)
    _require(is_short, f"stop.stop: a string is over {MAX_STOP_STRING_BYTES} bytes")
    _require(
        len(stop.stop_token_ids) <= MAX_STOP_TOKEN_IDS, f"stop.stop_token_ids: over {MAX_STOP_TOKEN_IDS} ids"
    )
    _check_ids("stop.stop_token_ids", stop.stop_token_ids, bounds)
    # EOS is banned with them: one token must be left besides.
    is_free = stop.min_tokens == 0 or len(set(stop.stop_token_ids) | bounds.eos_token_ids) < bounds.vocab_size
    _require(is_free, "stop.stop_token_ids: min_tokens would leave nothing to draw")


def _check_output(output: generation_pb2.OutputOptions) -> None:
    if output.HasField("logprobs"):
        _require(
            output.logprobs <= MAX_LOGPROBS, f"output.logprobs: {output.logprobs} is over {MAX_LOGPROBS}"
        )
    if output.prompt_logprobs:
        raise Unimplemented("output.prompt_logprobs: not there yet")


def resolve_max_tokens(
    stop: generation_pb2.StopConditions,
    num_prompt_tokens: int,
    max_sequence_tokens: int,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
) -> int:
    """How many tokens may be generated. A client's own limit must fit; the default one is cut to fit.

    `max_sequence_tokens`: prompt and output together, by the context and by every pool.
    """
    room = max_sequence_tokens - num_prompt_tokens
    if not stop.HasField("max_tokens"):
        _require(
            room >= max(1, stop.min_tokens),
            f"prompt: {num_prompt_tokens} tokens leave no room in {max_sequence_tokens}",
            CONTEXT_LENGTH_EXCEEDED,
        )
        return min(default_max_tokens, room)
    _require(
        stop.max_tokens <= room,
        f"stop.max_tokens: prompt ({num_prompt_tokens}) + max_tokens ({stop.max_tokens}) is over "
        f"{max_sequence_tokens} tokens",
        CONTEXT_LENGTH_EXCEEDED,
    )
    return stop.max_tokens
