"""From a YAML file to a checked ClusterConfig, or to errors that say where and what:

local.yaml:9: pools.decode.engine.kv_cashe: unknown key; did you mean "kv_cache"?
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.config import ClusterConfig

Location = tuple[int | str, ...]
_BOOL = "tag:yaml.org,2002:bool"
_DATE = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """Of YAML 1.1's words for truth only true and false: `off` and `on` are words of ours. A date is text."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # `0x_`, or a number of thousands of digits
            mark = node.start_mark
            raise yaml.constructor.ConstructorError(problem=str(error), problem_mark=mark) from error


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (_BOOL, _DATE)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


class ConfigError(Exception):
    """The file is no valid configuration. One line for each problem, each with its place."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_config(path: Path) -> ClusterConfig:
    """Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from error
    return parse_config(text, str(path))


def parse_config(text: str, source: str) -> ClusterConfig:
    """Raises ConfigError; `source` names the text in its messages."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader)
        repeated = list(_repeated(root))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError([f"{source}:{line}: not YAML: {error.problem or error}"]) from error
    except RecursionError as error:
        raise ConfigError([f"{source}: not a configuration: nested too deeply"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{source}: not YAML: {error}"]) from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError([f"{source}: not a configuration: it has no keys"])
    twice = [f"{source}:{line}: {_dotted(path)}: this key stands twice" for path, line in repeated]
    if twice:
        raise ConfigError(twice)
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        problems = [_problem(details, root, source) for details in error.errors()]
        raise ConfigError(problems) from error


def _problem(details: ErrorDetails, root: yaml.Node, source: str) -> str:
    path = details["loc"]
    place = f"{source}:{_line(root, path)}: {_dotted(path)}".removesuffix(": ")
    if details["type"] == "extra_forbidden":
        return f"{place}: unknown key{_nearest(path)}"
    if details["type"] == "missing":
        return f"{place}: missing"
    if details["type"] == "model_type":
        return f"{place}: needs keys of its own: {', '.join(_keys_at(path))}"
    message = details["msg"].removeprefix("Value error, ")
    given = details["input"]
    if isinstance(given, str | int | float) and repr(given) not in message:
        message += f" (not {given!r})"
    return f"{place}: {message[0].lower()}{message[1:]}"


def _dotted(path: Location) -> str:
    return ".".join(str(part) for part in path)


def _nearest(path: Location) -> str:
    names = _keys_at(path[:-1])
    close = difflib.get_close_matches(str(path[-1]), names, n=1)
    return f'; did you mean "{close[0]}"?' if close else f"; the keys here are {', '.join(names)}"


def _keys_at(path: Location) -> list[str]:
    """The valid keys of the section at `path`."""
    model: type[BaseModel] = ClusterConfig
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        model = next(kind for kind in (annotation, *get_args(annotation)) if _is_section(kind))
    return list(model.model_fields)


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _line(node: yaml.Node, path: Location) -> int:
    """The line of the key at `path`, or of the nearest thing around it that is there."""
    line = int(node.start_mark.line) + 1
    for part in path:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value == str(part):
                line, node = key.start_mark.line + 1, value
                break
        else:
            break
    return line


def _repeated(node: yaml.Node | None, path: Location = ()) -> Iterator[tuple[Location, int]]:
    """Keys that stand twice in one mapping: YAML would silently take the last."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        here = (*path, str(key.value))
        if key.value in seen:
            yield here, key.start_mark.line + 1
        seen.add(key.value)
        yield from _repeated(value, here)
