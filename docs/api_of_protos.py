"""The gRPC half of docs/api.md: calls, messages and enums, with their comments in the protos."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).parents[1]
SERVICES = ("Generation", "Admin")


def described(protos: Sequence[Path]) -> Sequence[FileDescriptorProto]:
    """With their comments, which the generated modules do not carry."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "all"
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto")]
        command += ["--include_source_info", f"--descriptor_set_out={out}", *map(str, protos)]
        subprocess.run(command, check=True)
        return FileDescriptorSet.FromString(out.read_bytes()).file


def of_protos(files: Sequence[FileDescriptorProto]) -> Iterator[str]:
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
