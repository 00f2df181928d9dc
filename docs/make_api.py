"""Writes docs/api.md from the protos and the models of HTTP. `make docs` runs it; a test sees that it was.

python docs/make_api.py [--print]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pdserve.v1.errors import PdserveError, Unimplemented  # noqa: E402
from router.http.calls import chat_call, completion_call  # noqa: E402
from router.http.errors import TABLE  # noqa: E402
from router.http.requests import (  # noqa: E402
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
    StreamOptions,
)
from router.http.structured import StructuredFields, StructuredOutputs  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
SERVICES = ("Generation", "Admin")
# Values that would ask for what a field stands for, whatever its type.
PROBES: Sequence[object] = (True, False, 2, [2], ["x"], [{}], {"x": 1}, "x")
NOTES = {"tool_choice": "of what is not served", "function_call": "of what is not served"}
HEAD = """# API reference

Made by `docs/make_api.py` from `proto/pdserve/v1` and `router/http`: do not edit.

The Python client (`from pdserve import Client`) has the same names; `help("pdserve.client.Client")` and
`help("pdserve.requests.GenerateOptions")` are its reference. What workers say to each other and to routers is
in [worker.proto](../proto/pdserve/v1/worker.proto); nobody else has to know it.

"""
HTTP_HEAD = """## HTTP

What each path serves and what statuses mean is in the [README](../README.md#over-http). Unknown fields are
ignored. A field that is known and **not served** is a 400 as soon as it is used.
"""
ERRORS_HEAD = """## Errors

One table for both: the classes of `pdserve.v1.errors`, which the Python client raises. Some reasons have an
HTTP status of their own (413, 415). See [failures](failures.md) for when each comes.

| class | gRPC status | HTTP | OpenAI's `type` |
|---|---|---|---|
"""


def page() -> str:
    files = _described(sorted((ROOT / "proto/pdserve/v1").glob("*.proto")))
    return HEAD + "\n".join([*_grpc(files), HTTP_HEAD, *_http(), ERRORS_HEAD + _errors()])


# -- gRPC ---------------------------------------------------------------------------------------------


def _described(protos: Sequence[Path]) -> Sequence[FileDescriptorProto]:
    """With their comments, which the generated modules do not carry."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "all"
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto")]
        command += ["--include_source_info", f"--descriptor_set_out={out}", *map(str, protos)]
        subprocess.run(command, check=True)
        return FileDescriptorSet.FromString(out.read_bytes()).file


def _grpc(files: Sequence[FileDescriptorProto]) -> Iterator[str]:
    """The public services, and all messages that they lead to."""
    comments: dict[str, str] = {}
    messages: dict[str, DescriptorProto] = {}
    enums: dict[str, EnumDescriptorProto] = {}
    for file in files:
        comments |= _comments(file)
        messages |= {f".{file.package}.{each.name}": each for each in file.message_type}
        enums |= {f".{file.package}.{each.name}": each for each in file.enum_type}
    wanted: list[str] = []
    services = {each.name: each for file in files for each in file.service}
    for service in (services[name] for name in SERVICES):
        yield f"## gRPC: `pdserve.v1.{service.name}`\n\n| call | asked | answered | |\n|---|---|---|---|"
        for method in service.method:
            stream = "stream of " if method.server_streaming else ""
            asked, answered = _link(method.input_type), f"{stream}{_link(method.output_type)}"
            told = comments.get(f"{service.name}.{method.name}", "")
            yield f"| `{method.name}` | {asked} | {answered} | {told} |"
            wanted += [method.input_type, method.output_type]
        yield ""
    yield "### Messages\n"
    for name in _reached(wanted, messages):
        if name in enums:
            yield from _enum(enums[name], comments)
        else:
            yield from _message(messages[name], comments)


def _comments(file: FileDescriptorProto) -> dict[str, str]:
    """ "Message.field" → what stands above it."""
    kinds: dict[int, Sequence[DescriptorProto | EnumDescriptorProto | ServiceDescriptorProto]] = {
        4: file.message_type,
        5: file.enum_type,
        6: file.service,
    }
    found = {}
    for location in file.source_code_info.location:
        path = list(location.path)
        text = " ".join(f"{location.leading_comments} {location.trailing_comments}".split())
        if not text or not path or path[0] not in kinds:
            continue
        owner = kinds[path[0]][path[1]]
        if len(path) == 2:
            found[owner.name] = text
        elif len(path) == 4 and path[2] == 2:
            parts = getattr(owner, {4: "field", 5: "value", 6: "method"}[path[0]])
            found[f"{owner.name}.{parts[path[3]].name}"] = text
    return {name: text.replace("|", "\\|") for name, text in found.items()}


def _reached(wanted: list[str], messages: dict[str, DescriptorProto]) -> list[str]:
    """In the order in which they are first named."""
    seen: list[str] = []
    for name in wanted:
        _reach(name, messages, seen)
    return seen


def _reach(name: str, messages: dict[str, DescriptorProto], seen: list[str]) -> None:
    if name in seen:
        return
    seen.append(name)
    for field in messages[name].field if name in messages else ():
        if field.type_name and not _map_entry(messages[name], field):
            _reach(field.type_name, messages, seen)


def _map_entry(message: DescriptorProto, field: FieldDescriptorProto) -> DescriptorProto | None:
    nested = {each.name: each for each in message.nested_type}
    return nested.get(field.type_name.rpartition(".")[2])


def _message(message: DescriptorProto, comments: dict[str, str]) -> Iterator[str]:
    yield f"#### {message.name}\n"
    if message.name in comments:
        yield f"{comments[message.name]}\n"
    if not message.field:
        yield "No fields.\n"
        return
    yield "| field | type | |\n|---|---|---|"
    for field in message.field:
        told = comments.get(f"{message.name}.{field.name}", "")
        if field.HasField("oneof_index") and not field.proto3_optional:
            told = f"One of `{message.oneof_decl[field.oneof_index].name}`. {told}".strip()
        yield f"| `{field.name}` | {_type(message, field)} | {told} |"
    yield ""


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    entry = _map_entry(message, field)
    if entry is not None:
        key, value = entry.field
        return f"map of {_plain(key)} to {_plain(value)}"
    repeated = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    optional = "optional " if field.proto3_optional else ""
    return f"{repeated}{optional}{_link(field.type_name) if field.type_name else _plain(field)}"


def _plain(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _enum(enum: EnumDescriptorProto, comments: dict[str, str]) -> Iterator[str]:
    yield f"#### {enum.name}\n\n| value | |\n|---|---|"
    for value in enum.value[1:]:  # the first is *_UNSPECIFIED
        yield f"| `{value.name}` | {comments.get(f'{enum.name}.{value.name}', '')} |"
    yield ""


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


# -- HTTP ---------------------------------------------------------------------------------------------


def _http() -> Iterator[str]:
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


def _errors() -> str:
    rows = [
        f"| `{kind.__name__}` | `{kind.code.name}` | {mapped.status} | `{mapped.type}` |"
        for kind, mapped in TABLE.items()
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), encoding="utf-8")
