"""What the commands that count lost requests say of answers, pauses and memory."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from benchmarks.lost_requests import Planned, Troublemaker, under_troubles
from benchmarks.soak import Soak
from benchmarks.under_faults import growth
from benchmarks.under_faults.answers import Answer, End
from benchmarks.under_faults.asks import Ask, Sizes, mixed
from benchmarks.under_faults.load import Load
from benchmarks.under_faults.report import report
from benchmarks.under_faults.right import Comparison, compare
from benchmarks.under_faults.serving import Served
from benchmarks.under_faults.troubles import Cluster, NotWhole, Trouble
from pdserve.client import Client
from tests.models import tiny_model
from tests.unit.engine.driving import Reference

ASK = Ask(0, (1, 2, 3), 4, temperature=0.0, repetition_penalty=1.0)


def answer(ids: Sequence[int], end: End = End.WHOLE, arrivals: Sequence[float] = ()) -> Answer:
    return Answer(ASK, asked_at=0.0, ids=list(ids), arrivals=list(arrivals), end=end)


def test_the_same_seed_asks_the_same_and_every_kind_is_there() -> None:
    asks = mixed(40, Sizes(prompt=(2, 9), output=(3, 5)), seed=1)
    assert asks == mixed(40, Sizes(prompt=(2, 9), output=(3, 5)), seed=1)
    assert all(2 <= len(ask.prompt) <= 9 and 3 <= ask.max_tokens <= 5 for ask in asks)
    assert {ask.temperature for ask in asks} == {0.0, 0.9}
    assert {ask.repetition_penalty for ask in asks} == {1.0, 1.1}
    assert len({ask.seed for ask in asks}) == 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        (answer([5, 6, 7, 8]), True),
        (answer([5, 6], End.CANCELLED), True),
        (answer([], End.FAILED), True),
        (answer([5, 6]), False),  # whole, and too short
        (answer([5, 6, 7, 8, 9]), False),
        (answer([5, 6, 9], End.CANCELLED), False),
    ],
)
def test_answers_are_compared_so_far_as_they_came(given: Answer, is_right: bool, folder: Path) -> None:
    found = compare([given], {0: [5, 6, 7, 8]}, folder)
    assert found == Comparison(1, 0, () if is_right else (0,))


def test_only_a_tie_of_the_model_excuses_another_token(folder: Path) -> None:
    """Greedy: the best one and itself are as near as can be, the best and the worst are not."""
    scores = Reference(folder).scores(ASK.prompt)[-1]
    best, worst = int(scores.argmax()), int(scores.argmin())
    assert compare([answer([worst, 1, 1, 1])], {0: [best, 1, 1, 1]}, folder).wrong == (0,)


def test_pauses_count_for_the_trouble_before_them() -> None:
    answers = [answer([1, 2, 3, 4], arrivals=[1.0, 2.0, 7.0, 7.5])]
    troubles = [Trouble("first", 2.5, 1.0), Trouble("second", 7.2, 1.0)]
    told = report(answers, Comparison(1, 0, ()), troubles, began=0.0, ended=8.0)
    assert told.longest_pause_s == 5.0
    assert [each.longest_pause_s for each in told.troubles] == [5.0, 0.5]
    assert told.longest_ttft_s == 1.0
    assert (told.num_whole, told.num_failed) == (1, 0)


def test_a_slope_is_told_of_what_comes_behind_the_warm_up() -> None:
    warm = [(float(second), 100.0 + 10 * second) for second in range(3)]
    steady = [(float(second), 130.0 + 0.5 * second) for second in range(3, 12)]
    found = growth._growth("worker", warm + steady, mapped_mib=9.0)
    assert found.mib_per_hour == pytest.approx(1800)
    assert growth._growth("worker", warm, mapped_mib=9.0).mib_per_hour is None


async def test_clients_do_not_run_away_from_a_trouble_that_is_still_to_come() -> None:
    may_act = asyncio.Event()

    async def act(_: Cluster) -> Trouble:
        return Trouble("killed", 0.0, 0.0)

    async def act_late(_: Cluster) -> Trouble:
        await may_act.wait()
        return Trouble("killed late", 0.0, 0.0)

    planned = [Planned(0.0, act_late), Planned(0.5, act)]
    maker = Troublemaker(cast("Cluster", None), planned, num_requests=100)
    load = Load("127.0.0.1:1", 1, 1.0, lambda: None)
    running = asyncio.ensure_future(maker.run(load))
    await asyncio.wait_for(maker.gate(55), 5)  # the first has begun, the second is for 50 of 100
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(maker.gate(56), 0.1)
    load.answers.extend(answer([1]) for _ in range(50))
    may_act.set()
    await asyncio.wait_for(maker.gate(56), 5)
    await asyncio.wait_for(running, 5)
    assert [trouble.what for trouble in maker.troubles] == ["killed late", "killed"]


async def test_a_pool_that_is_never_whole_again_ends_the_run() -> None:
    async def act(_: Cluster) -> Trouble:
        raise NotWhole("after 300 s there are not 2 workers ready")

    maker = Troublemaker(cast("Cluster", None), [Planned(0.1, act), Planned(0.5, act)], num_requests=40)
    load = Load("127.0.0.1:1", 2, 1.0, lambda: None)
    asks = mixed(40, Sizes(prompt=(2, 9), output=(3, 5)), seed=1)
    with pytest.raises(NotWhole):
        await asyncio.wait_for(under_troubles(load, asks, maker), 30)


async def test_a_soak_ends_with_the_trouble_that_its_cluster_does_not_come_out_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: object) -> Trouble:
        raise NotWhole("after 300 s there are not 2 workers ready")

    for what in ("kill", "stop", "drain", "scale"):
        monkeypatch.setattr(Cluster, what, never)
    options = argparse.Namespace(seed=0, prefill=1, decode=1, trouble_every=0.0)
    soak = Soak(cast("Served", None), cast("Client", None), options, [])
    await asyncio.wait_for(soak.make_trouble(), 10)
    assert soak._broken.startswith("after 300 s")
