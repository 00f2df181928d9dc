"""The HTTP half of docs/api.md: the fields of the models, and which of them are refused."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from pdserve.v1.errors import PdserveError, Unimplemented
from router.http.calls import chat_call, completion_call
from router.http.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
    StreamOptions,
)
from router.http.structured import StructuredFields, StructuredOutputs

# Values that would ask for what a field stands for, whatever its type.
PROBES: Sequence[object] = (True, False, 2, [2], ["x"], [{}], {"x": 1}, "x")
NOTES = {"tool_choice": "of what is not served", "function_call": "of what is not served"}


def of_http() -> Iterator[str]:
    shared = set(SamplingFields.model_fields)
    yield "### Fields of both `/v1/completions` and `/v1/chat/completions`\n"
    yield from _fields(SamplingFields, SamplingFields.model_fields)
    for path, model in (
        ("/v1/completions", CompletionRequest),
        ("/v1/chat/completions", ChatCompletionRequest),
    ):
        own = [
            name for name, info in model.model_fields.items() if name not in shared or _differs(model, name)
        ]
        yield f"### `{path}`\n"
        yield from _fields(model, own)
    for name, part in (("stream_options", StreamOptions), ("structured_outputs", StructuredOutputs)):
        yield f"### `{name}`\n"
        yield from _fields(part, part.model_fields)


def _differs(model: type[BaseModel], name: str) -> bool:
    own, shared = model.model_fields[name], SamplingFields.model_fields[name]
    return own.default != shared.default or own.annotation != shared.annotation


def _fields(model: type[BaseModel], names: Sequence[str] | typing.Iterable[str]) -> Iterator[str]:
    yield "| field | type | default | |\n|---|---|---|---|"
    for name in names:
        info = model.model_fields[name]
        default = "**needed**" if info.default is PydanticUndefined else _default(info.default)
        told = NOTES.get(name, "")
        if issubclass(model, StructuredFields) and _is_refused(name):
            told = "not served"
        yield f"| `{info.alias or name}` | {_annotation(info.annotation)} | {default} | {told} |"
    yield ""


def _default(value: object) -> str:
    return (
        ""
        if value is None or value == ""
        else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    )


def _annotation(kind: object) -> str:
    """Python's, in the words of JSON."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _annotation(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_annotation(each) for each in arguments if each is not type(None))
    if origin is list:
        return f"list of {_annotation(arguments[0])}"
    if origin is dict:
        return "object" if arguments[1] is object else f"object of {_annotation(arguments[1])}"
    names: dict[object, str] = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        object: "anything",
    }
    return names.get(kind, "object")


def _is_refused(name: str) -> bool:
    """Whether asking for it is answered by "not served"."""
    return any(_is_unserved(name, probe, ask) for probe in PROBES for ask in (_complete, _chat))


def _is_unserved(name: str, value: object, ask: Callable[[dict[str, object]], object]) -> bool:
    try:
        ask({name: value})
    except Unimplemented as error:
        return re.match(rf"{name}\b", str(error)) is not None
    except (ValidationError, PdserveError):
        return False
    return False


def _complete(fields: dict[str, object]) -> object:
    return completion_call(CompletionRequest.model_validate({"prompt": "x", **fields}), "x")


def _chat(fields: dict[str, object]) -> object:
    messages = [{"role": "user", "content": "x"}]
    return chat_call(ChatCompletionRequest.model_validate({"messages": messages, **fields}), "x")
