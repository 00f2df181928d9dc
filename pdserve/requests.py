"""From a caller's prompt and keywords to a GenerateRequest. What cannot be encoded is InvalidArgument."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence

from google.protobuf.message import Message
from typing_extensions import TypedDict

from pdserve.results import ChatMessage
from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument

Prompt = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, str]]
"""Text, token ids, or the messages of a chat."""

LONGEST_TIMEOUT_S = 10 * 365 * 86400.0


class GenerateOptions(TypedDict, total=False):
    """The keywords of `generate` and `generate_stream`, each with what stands for it where it is left out."""

    max_tokens: int  # 256
    min_tokens: int  # 0
    temperature: float  # 1; 0 is greedy
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    seed: int  # one is drawn
    repetition_penalty: float  # 1: off
    presence_penalty: float  # 0: off
    frequency_penalty: float  # 0: off
    logit_bias: Mapping[int, float]
    json_schema: Mapping[str, object] | str  # the text must be JSON of this schema
    regex: str  # the whole text must match
    grammar: str  # in Lark's syntax
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    logprobs: int  # none; k: the chosen token's, and the k likeliest ones'
    prompt_logprobs: bool
    n: int  # 1
    model: str  # the one that is served
    request_id: str
    add_generation_prompt: bool  # for a chat: true


# Which message of the request each plain keyword belongs to; "" is the request itself.
_HOME = {
    "": ("n", "model", "request_id"),
    "sampling": (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
    "stop": ("max_tokens", "min_tokens", "ignore_eos", "include_stop_in_output"),
    "output": ("logprobs", "prompt_logprobs"),
}


def build_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """None is as good as left out. Raises InvalidArgument; TypeError for a keyword that there is not."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown keyword: {', '.join(sorted(unknown))}")
    request = generation_pb2.GenerateRequest()
    _put_prompt(request, prompt, options.get("add_generation_prompt"))
    for home, names in _HOME.items():
        message = getattr(request, home) if home else request
        for name in names:
            value = options.get(name)
            if value is not None:
                put(message, name, value)
    stop = options.get("stop")
    if stop is not None:
        _extend("stop", request.stop.stop, (stop,) if isinstance(stop, str) else stop)
    stop_token_ids = options.get("stop_token_ids")
    if stop_token_ids is not None:
        _extend("stop_token_ids", request.stop.stop_token_ids, stop_token_ids)
    bias = options.get("logit_bias")
    if bias is not None:
        encode("logit_bias", lambda: request.sampling.logit_bias.update(bias))
    _put_constraint(request, options)
    return request


def _put_constraint(request: generation_pb2.GenerateRequest, options: GenerateOptions) -> None:
    schema = options.get("json_schema")
    if schema is not None and not isinstance(schema, str):
        try:
            schema = json.dumps(schema)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"json_schema: {error}") from error
    constraints = {"json_schema": schema, "regex": options.get("regex"), "grammar": options.get("grammar")}
    given = {name: value for name, value in constraints.items() if value is not None}
    if len(given) > 1:
        raise InvalidArgument(f"{' and '.join(given)}: the text can be constrained in one way only")
    for name, value in given.items():
        put(request.sampling.structured, name, value)


def time_limit(timeout: float | None) -> float | None:
    """For gRPC, which takes what is too large for it as a deadline that has passed. None: none was set."""
    if timeout is None or timeout > LONGEST_TIMEOUT_S:
        return None
    if math.isnan(timeout):
        raise InvalidArgument("timeout: is not a number")
    return timeout


def put(message: Message, name: str, value: object) -> None:
    """Set one field, by name."""
    encode(name, lambda: setattr(message, name, value))


def encode(name: str, action: Callable[[], object]) -> None:
    try:
        action()
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(f"{name}: {error}") from error


def _extend(name: str, field: object, values: Sequence[object]) -> None:
    extend: Callable[[Sequence[object]], object] = field.extend  # type: ignore[attr-defined]
    encode(name, lambda: extend(values))


def _put_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt, add_opening: bool | None) -> None:
    if isinstance(prompt, str):
        put(request, "text", prompt)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        kind = type(prompt).__name__
        raise InvalidArgument(f"prompt: is text, token ids, or the messages of a chat, and no {kind}")
    elif prompt and all(isinstance(part, ChatMessage | Mapping) for part in prompt):
        for part in prompt:
            message = request.chat.messages.add()
            for name, value in _role_and_content(part).items():
                put(message, name, value)
        if add_opening is not None:
            request.chat.add_generation_prompt = add_opening
    else:
        request.token_ids.SetInParent()
        _extend("prompt", request.token_ids.ids, prompt)


def _role_and_content(part: object) -> Mapping[str, object]:
    if isinstance(part, ChatMessage):
        return {"role": part.role, "content": part.content}
    if isinstance(part, Mapping) and part.keys() == {"role", "content"}:
        return part
    raise InvalidArgument("prompt: a chat message has a role and a content")
