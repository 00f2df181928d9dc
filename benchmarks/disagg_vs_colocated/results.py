"""The file of results: each finished point is in it at once, and is not measured again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.records import Failure, RequestRecord

_FORMAT = 2
# Seconds are kept to a tenth of a millisecond.
_DIGITS = 4


class Results:
    """`setting`: what all points of one file have in common. Raises BenchError where the file's differs."""

    def __init__(self, path: Path, setting: Mapping[str, object]) -> None:
        self._path = path
        self._setting = json.loads(json.dumps(setting))
        self._points: dict[str, object] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            whole = json.loads(self._path.read_text(encoding="utf-8"))
            found, points = whole["setting"], dict(whole["points"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{self._path} cannot be read: {error}") from error
        if whole.get("format") != _FORMAT or found != self._setting:
            names = sorted(found.keys() | self._setting.keys()) if isinstance(found, dict) else []
            other = [name for name in names if found.get(name) != self._setting.get(name)]
            raise BenchError(f"{self._path} was measured with another {', '.join(other) or 'format'}: "
                             "give another --output, or go on as it was begun")  # fmt: skip
        self._points = points

    def __contains__(self, key: str) -> bool:
        return key in self._points

    def get(self, key: str) -> object:
        """None: it was not measured."""
        return self._points.get(key)

    def put(self, key: str, value: object) -> None:
        """On disk when it returns, whole or not at all."""
        self._points[key] = value
        whole = {"format": _FORMAT, "setting": self._setting, "points": self._points}
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with beside.open("w", encoding="utf-8") as file:
            json.dump(whole, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)

    def number(self, key: str, make: Callable[[], float]) -> float:
        """The one in the file, or a new one, which is in the file then."""
        if key not in self:
            self.put(key, make())
        return cast(float, self.get(key))


def as_rows(records: Sequence[RequestRecord]) -> list[dict[str, object]]:
    return [
        {
            "scheduled_s": round(record.scheduled_s, _DIGITS),
            "sent_s": round(record.sent_s, _DIGITS),
            "ended_s": round(record.ended_s, _DIGITS),
            "arrivals_s": [round(each, _DIGITS) for each in record.arrivals_s],
            "num_prompt_tokens": record.num_prompt_tokens,
            "num_tokens": record.num_tokens,
            "failure": None if record.failure is None else [record.failure.code, record.failure.message],
        }
        for record in records
    ]


def from_rows(rows: object) -> list[RequestRecord]:
    """Without what the server counts of itself."""
    return [_record(index, row) for index, row in enumerate(cast("list[dict[str, object]]", rows))]


def _record(index: int, row: Mapping[str, object]) -> RequestRecord:
    failure = cast("list[str] | None", row["failure"])
    return RequestRecord(
        index=index,
        scheduled_s=cast(float, row["scheduled_s"]),
        sent_s=cast(float, row["sent_s"]),
        ended_s=cast(float, row["ended_s"]),
        arrivals_s=tuple(cast("list[float]", row["arrivals_s"])),
        num_prompt_tokens=cast(int, row["num_prompt_tokens"]),
        num_cached_tokens=None,
        num_tokens=cast(int, row["num_tokens"]),
        failure=None if failure is None else Failure(failure[0], failure[1]),
        timings=None,
    )
