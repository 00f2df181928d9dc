"""What came of a run, in numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.under_faults.answers import Answer, End
from benchmarks.under_faults.right import Comparison
from benchmarks.under_faults.troubles import Trouble


@dataclass(frozen=True, slots=True)
class TroubleReport:
    what: str
    # Since the load began.
    at_s: float
    whole_again_s: float
    # Of a stream that was under way, and of a request that waited for its first token: the longest that ended
    # after this trouble and before the next.
    longest_pause_s: float
    longest_ttft_s: float


@dataclass(frozen=True, slots=True)
class RunReport:
    num_requests: int
    num_whole: int
    num_cancelled: int
    num_failed: int
    errors: dict[str, int]
    num_resumed: int
    num_wrong: int
    num_ties: int
    longest_pause_s: float
    longest_ttft_s: float
    took_s: float
    troubles: tuple[TroubleReport, ...]


def report(
    answers: Sequence[Answer], comparison: Comparison, troubles: Sequence[Trouble], began: float, ended: float
) -> RunReport:
    ends = Counter(answer.end for answer in answers)
    return RunReport(
        num_requests=len(answers),
        num_whole=ends[End.WHOLE],
        num_cancelled=ends[End.CANCELLED],
        num_failed=ends[End.FAILED],
        errors=dict(Counter(answer.error for answer in answers if answer.end is End.FAILED)),
        num_resumed=sum(answer.num_resumes > 0 for answer in answers),
        num_wrong=len(comparison.wrong),
        num_ties=comparison.num_ties,
        longest_pause_s=_longest_pause_s(answers, began, ended),
        longest_ttft_s=_longest_ttft_s(answers, began, ended),
        took_s=ended - began,
        troubles=tuple(_troubles(answers, troubles, began, ended)),
    )


def _troubles(
    answers: Sequence[Answer], troubles: Sequence[Trouble], began: float, ended: float
) -> list[TroubleReport]:
    told = []
    for number, trouble in enumerate(troubles):
        until = troubles[number + 1].at if number + 1 < len(troubles) else ended
        told.append(
            TroubleReport(
                trouble.what,
                trouble.at - began,
                trouble.whole_again_s,
                _longest_pause_s(answers, trouble.at, until),
                _longest_ttft_s(answers, trouble.at, until),
            )
        )
    return told


def _longest_pause_s(answers: Sequence[Answer], since: float, until: float) -> float:
    """Of those that ended in that time."""
    pauses = (pause for answer in answers for at, pause in answer.pauses() if since < at <= until)
    return max(pauses, default=0.0)


def _longest_ttft_s(answers: Sequence[Answer], since: float, until: float) -> float:
    waits = (
        answer.arrivals[0] - answer.asked_at
        for answer in answers
        if answer.arrivals and since < answer.arrivals[0] <= until
    )
    return max(waits, default=0.0)


def print_report(told: RunReport, console: Console) -> None:
    table = Table(title="troubles", title_justify="left")
    for title in ("what", "at s", "whole again after s", "longest pause s", "longest TTFT s"):
        table.add_column(title, justify="left" if title == "what" else "right")
    for each in told.troubles:
        times = (each.at_s, each.whole_again_s, each.longest_pause_s, each.longest_ttft_s)
        table.add_row(each.what, *(f"{seconds:.1f}" for seconds in times))
    console.print(table)
    cancelled = f", {told.num_cancelled} cancelled by clients" if told.num_cancelled else ""
    asked = told.num_requests - told.num_cancelled
    console.print(
        f"{told.num_whole} of {asked} succeeded{cancelled}; {told.num_wrong} with other tokens than "
        f"undisturbed ({told.num_ties} ties excused); {told.num_resumed} had lost a worker.\n"
        f"Longest pause {told.longest_pause_s:.1f} s, longest TTFT {told.longest_ttft_s:.1f} s; "
        f"{told.took_s:.0f} s in all."
    )
    for error, count in told.errors.items():
        console.print(f"  {count} times {error}")


def write_json(path: Path, what: object) -> None:
    """`what`: a dataclass."""
    path.write_text(json.dumps(asdict(what), indent=2) + "\n", encoding="utf-8")  # type: ignore[call-overload]
