"""Public traces, read from small files of the same shape."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.trace import Trace, TraceRow, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:58.5000000,374,44
2023-11-16 23:59:59.7500001,396,109
2023-11-17 00:00:01.5000000,879,55
"""


def azure(folder: Path, text: str = AZURE) -> Path:
    file = folder / "azure.csv"
    file.write_text(text)
    return file


def mooncake(folder: Path, *rows: tuple[int, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file = folder / "mooncake.jsonl"
    file.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    return file


def test_azure_times_count_from_the_first_request_over_midnight(tmp_path: Path) -> None:
    trace = read_trace(azure(tmp_path))
    assert trace.name == "azure.csv"
    assert [(row.num_prompt_tokens, row.num_tokens) for row in trace.rows] == [
        (374, 44),
        (396, 109),
        (879, 55),
    ]
    assert [row.at_s for row in trace.rows] == pytest.approx([0, 1.2500001, 3.0], abs=1e-6)
    assert all(row.block_ids is None for row in trace.rows)
    assert trace.rate == pytest.approx(2 / 3)


def test_timestamps_with_a_zone_are_read_too(tmp_path: Path) -> None:
    lines = AZURE.replace("5000000,", "500000+00:00,").replace(".7500001,", "+00:00,")
    trace = read_trace(azure(tmp_path, lines))
    assert [row.at_s for row in trace.rows] == pytest.approx([0, 0.5, 3.0], abs=1e-6)


@pytest.fixture
def far_from_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "EST5")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("zone", ["", "Z", "+02:00"])
def test_times_with_and_without_fractions_are_of_one_zone(
    tmp_path: Path, far_from_utc: None, zone: str
) -> None:
    times = ("2023-11-16 18:15:46.5", "2023-11-16 18:15:47", "2023-11-16 18:15:48.25")
    rows = "".join(f"{time}{zone},5,5\n" for time in times)
    trace = read_trace(azure(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}"))
    assert [row.at_s for row in trace.rows] == pytest.approx([0, 0.5, 1.75], abs=1e-6)


def test_mooncake_has_milliseconds_and_blocks(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path, (3000, 1030, 5, [0, 1, 2]), (4500, 512, 7, [0])))
    assert trace.rows == (TraceRow(0.0, 1030, 5, (0, 1, 2)), TraceRow(1.5, 512, 7, (0,)))


def test_rows_are_put_in_the_order_of_their_times(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path, (4000, 512, 1, [1]), (1000, 512, 2, [2])))
    assert [(row.at_s, row.num_tokens) for row in trace.rows] == [(0.0, 2), (3.0, 1)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no requests in it"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.1,3\n", "request 1 is not as expected: no Generated"),
        (AZURE.replace("396", "many"), "request 2 is not as expected"),
        (AZURE.replace("879", "0"), "request 3 is not as expected: a prompt and an answer have a token"),
        (AZURE.replace("2023-11-16 23:59:59.7500001", "yesterday"), "request 2 is not as expected"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}', "2 hash_ids for 5"),
        ('{"timestamp": 0, "output_length": 1, "hash_ids": [1]}', "request 1 is not as expected"),
        ('{"timestamp": "a", "input_length": 5, "output_length": 1}', "'a' is no number"),
        ('{"timestamp": 0, ', "request 1 is not as expected"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n[7]', "request 2 .*it is no JSON object"),
        (AZURE + '"2023-11-17 00:00:02.5' + 200_000 * "0", "request 4 is not as expected: field larger"),
    ],
)
def test_what_is_no_trace_is_told_with_the_request(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(BenchError, match=told):
        read_trace(azure(tmp_path, text))


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_a_window_begins_at_its_offset() -> None:
    trace = Trace("t", tuple(TraceRow(float(at), 1, at + 1, None) for at in range(10)))
    assert [row.num_tokens for row in trace.window(3.5, 2).rows] == [5, 6]
    assert len(trace.window(3.5).rows) == 6
    with pytest.raises(BenchError, match=r"has 6 requests from 3\.5 s on, not 7"):
        trace.window(3.5, 7)
    with pytest.raises(BenchError, match="has 0 requests from 99 s on"):
        trace.window(99)
