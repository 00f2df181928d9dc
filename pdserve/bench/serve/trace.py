"""Public traces: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake's JSONL (timestamp in
ms, input_length, output_length, hash_ids).

Azure LLM inference traces: github.com/Azure/AzurePublicDataset. Mooncake: github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.workload import mean_rate

# Mooncake's hash_ids name blocks of this many prompt tokens; equal ids are equal beginnings.
MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float  # since the trace begins
    num_prompt_tokens: int
    num_tokens: int  # of the answer
    block_ids: tuple[int, ...] | None  # None: the trace has none


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    rows: tuple[TraceRow, ...]  # by time

    @property
    def rate(self) -> float:
        """Requests a second; infinite where all come at once."""
        return mean_rate([row.at_s for row in self.rows])

    def window(self, start_s: float, num_requests: int | None = None) -> Trace:
        """The first `num_requests` (None: all) from `start_s` on. Raises BenchError where there are fewer."""
        rows = tuple(row for row in self.rows if row.at_s >= start_s)
        wanted = max(1, len(rows)) if num_requests is None else num_requests
        if len(rows) < wanted:
            raise BenchError(f"{self.name} has {len(rows)} requests from {start_s:g} s on, not {wanted}")
        return Trace(self.name, rows[:wanted])


def read_trace(path: Path) -> Trace:
    """Of either kind, told by what is in it. Raises BenchError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    read = _mooncake if text.lstrip().startswith("{") else _azure
    rows: list[TraceRow] = []
    try:
        for row in read(text.splitlines()):
            rows.append(row)
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise BenchError(f"{path}: request {len(rows) + 1} is not as expected: {error}") from error
    if not rows:
        raise BenchError(f"{path}: no requests in it")
    rows.sort(key=lambda row: row.at_s)
    begin_s = rows[0].at_s
    shifted = (
        TraceRow(row.at_s - begin_s, row.num_prompt_tokens, row.num_tokens, row.block_ids) for row in rows
    )
    return Trace(path.name, tuple(shifted))


def _azure(lines: Iterable[str]) -> Iterator[TraceRow]:
    for row in csv.DictReader(lines):
        missing = [name for name in _AZURE_COLUMNS if row.get(name) is None]
        if missing:
            raise ValueError(f"no {missing[0]}; known are Azure's CSV and Mooncake's JSONL")
        at_s = _seconds(row["TIMESTAMP"])
        yield _checked(TraceRow(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), None))


def _seconds(timestamp: str) -> float:
    """Fractions have seven digits, more than datetime reads. What names no zone is UTC, wherever that is."""
    whole, _, rest = timestamp.strip().partition(".")
    zone = rest.lstrip("0123456789")
    digits = rest[: len(rest) - len(zone)]
    moment = datetime.fromisoformat((whole + zone).replace("Z", "+00:00"))
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRow]:
    for line in lines:
        if line.strip():
            row: object = json.loads(line)
            if not isinstance(row, Mapping):
                raise ValueError("it is no JSON object")
            ids = row.get("hash_ids")
            if ids is not None and not isinstance(ids, list):
                raise ValueError("hash_ids is no list")
            blocks = None if ids is None else tuple(int(each) for each in ids)
            lengths = (_number(row["input_length"]), _number(row["output_length"]))
            yield _checked(
                TraceRow(_number(row["timestamp"]) / 1e3, int(lengths[0]), int(lengths[1]), blocks)
            )


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _checked(row: TraceRow) -> TraceRow:
    if row.num_prompt_tokens < 1 or row.num_tokens < 1:
        raise ValueError("a prompt and an answer have a token at least")
    if row.block_ids is not None and len(row.block_ids) != -(-row.num_prompt_tokens // MOONCAKE_BLOCK_TOKENS):
        raise ValueError(
            f"{len(row.block_ids)} hash_ids for {row.num_prompt_tokens} tokens in blocks of"
            f" {MOONCAKE_BLOCK_TOKENS}"
        )
    return row
