"""How log lines look. What a line is about stands in fields of its own, given as `extra=fields(...)`.

text: 2026-01-31 12:00:00,000 INFO router.events pid=7 QUEUED request_id=mine transfer_id=4c… trace_id=0a…
json: the same as one object, the fields among its keys.

Prompts and answers are in no line, at no level. Below info there is nothing from libraries (grpc, asyncio).
"""

from __future__ import annotations

import json
import logging
import re

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from observability.config import LogFormat, ObservabilityConfig

_NOT_FIELDS = frozenset(RESERVED_ATTRS) | {"message", "asctime"}
# The first part of our loggers' names.
_OURS = frozenset(
    {"observability", "trust", "engine", "kv_transfer", "worker", "prefill_worker", "decode_worker"}
    | {"router", "cluster", "pdserve"}
)
_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)


def fields(**given: object) -> dict[str, object]:
    """For a log call's `extra`; what is None is left out."""
    return {name: value for name, value in given.items() if value is not None}


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s pid=%(process)d %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        values = record.__dict__
        # With an underscore: what libraries keep in records for themselves.
        names = [name for name in values if name not in _NOT_FIELDS and not name.startswith("_")]
        told = [f" {name}={_quoted(str(values[name]))}" for name in names]
        return super().formatMessage(record) + "".join(told)


def _quoted(value: str) -> str:
    """A client's own text, its request id, must not forge a line or a field."""
    return value if _PLAIN.fullmatch(value) else repr(value)


def _json_formatter() -> logging.Formatter:
    return JsonFormatter(
        ["levelname", "name", "process", "message"],
        rename_fields={"levelname": "level", "name": "logger", "process": "pid"},
        timestamp=True,
        json_ensure_ascii=False,
    )


def log_by(handler: logging.Handler, config: ObservabilityConfig) -> None:
    """From now on this process logs by `handler`."""
    is_json = config.log_format is LogFormat.JSON
    handler.setFormatter(_json_formatter() if is_json else TextFormatter())
    handler.addFilter(_is_wanted)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(config.log_level.name)


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.INFO or record.name.partition(".")[0] in _OURS


def message_of(line: str) -> str:
    """What a line of either format says, for people; a text line as it is."""
    try:
        said = json.loads(line)
    except ValueError:
        return line
    return str(said["message"]) if isinstance(said, dict) and "message" in said else line
