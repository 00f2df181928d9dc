"""Which steps of a start are shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from pdserve.cli.console import err, out
from pdserve.cli.steps import SteadySteps, shown_steps
from pdserve.cli.watching import Steps
from pdserve.client import Cluster, Role, WorkerState

PLACED = "waits to be placed: wants CPU 1; there is room for it now"


class Shown:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.is_shown = threading.Event()

    def __call__(self, what: str, how: str) -> None:
        self.lines.append((what, how))
        self.is_shown.set()


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def patient(shown: Shown) -> Iterator[SteadySteps]:
    steps = SteadySteps(shown, patience_s=600)
    yield steps
    steps.close()


def test_waiting_that_is_over_at_once_is_not_shown(patient: SteadySteps, shown: Shown) -> None:
    patient.tell("decode-0", PLACED)
    patient.tell("model", "waiting for a.gguf to be converted")
    patient.tell("model", "converting a.gguf to safetensors (once)")
    patient.tell("decode-0", "loading libraries")
    assert shown.lines == [
        ("model", "converting a.gguf to safetensors (once)"),
        ("decode-0", "loading libraries"),
    ]


def test_waiting_that_lasts_is_shown(shown: Shown) -> None:
    steps = SteadySteps(shown, patience_s=0.01)
    steps.tell("decode-0", PLACED)
    assert shown.is_shown.wait(60)
    assert shown.lines == [("decode-0", PLACED)]


def test_only_the_newest_waiting_of_each_is_held(patient: SteadySteps, shown: Shown) -> None:
    for number in range(3):
        patient.tell("decode-0", f"waits to be placed: {number}")
    assert shown.lines == []
    assert len(patient._held) == 1


def test_a_step_may_be_told_while_one_is_shown() -> None:
    lines: list[str] = []

    def show(what: str, how: str) -> None:
        lines.append(how)
        if how == "first":
            steps.tell(what, "a signal came")

    steps = SteadySteps(show)
    steps.tell("cluster", "first")
    assert lines == ["first", "a signal came"]


def test_nothing_is_shown_behind_the_end(shown: Shown) -> None:
    steps = SteadySteps(shown, patience_s=0.05)
    steps.tell("decode-0", PLACED)
    (timer,) = steps._held.values()
    steps.close()
    timer.join(60)
    assert shown.lines == []


def test_brackets_in_a_step_are_shown_as_they_are() -> None:
    detail = "cannot load [/models/a[awq]]: see [fd00::1]:5000"
    with out.capture() as captured:
        Steps(seen()).show(seen(detail))
    assert f"starting: {detail}\n" in captured.get()
    with err.capture() as captured, shown_steps() as tell:
        tell("model", detail)
    assert f" {detail}\n" in captured.get()


def seen(*details: str) -> Cluster:
    """A worker for each detail, all of them starting: of a cluster no more than is looked at."""
    workers = [
        SimpleNamespace(id=f"decode-{number}", state=WorkerState.STARTING, detail=detail)
        for number, detail in enumerate(details)
    ]
    return cast(Cluster, SimpleNamespace(pools=[SimpleNamespace(role=Role.DECODE, workers=workers)]))


@pytest.mark.parametrize(("patience_s", "is_shown"), [(600.0, False), (0.0, True)])
def test_scaling_shows_waiting_only_where_it_lasts(patience_s: float, is_shown: bool) -> None:
    steps = Steps(seen(), patience_s)
    with out.capture() as captured:
        for details in ((PLACED,), (PLACED,), ("loading libraries",), ()):
            steps.show(seen(*details))
    lines = captured.get()
    assert (PLACED in lines) is is_shown
    assert "starting: loading libraries" in lines
    assert "gone" in lines
