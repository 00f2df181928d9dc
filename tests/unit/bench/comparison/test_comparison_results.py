"""What is kept of a comparison, and what is shown of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.disagg_vs_colocated import goodput, interference, phase_rates, systems, unloaded
from benchmarks.disagg_vs_colocated.__main__ import _parser, _wanted, main, setting
from benchmarks.disagg_vs_colocated.comparing import _num_points, _points, _visits
from benchmarks.disagg_vs_colocated.machine import note_run
from benchmarks.disagg_vs_colocated.phases import PhaseTimes, PrefillTime, StepTime
from benchmarks.disagg_vs_colocated.results import Results, as_rows, from_rows
from benchmarks.disagg_vs_colocated.round_robin import RoundRobin
from benchmarks.disagg_vs_colocated.settings import QUICK, SLOS, Ordering, System
from benchmarks.disagg_vs_colocated.stream_figures import gaps_within, loaded_figures
from benchmarks.disagg_vs_colocated.trace_load import TraceLoad
from cluster.config import ClusterConfig
from pdserve.bench import own_cluster
from pdserve.bench.errors import BenchError
from pdserve.bench.serve.client import Answer, Served
from pdserve.bench.serve.records import Failure
from pdserve.bench.serve.sweep import Crossing
from pdserve.bench.serve.workload import PlannedRequest
from tests.unit.bench.serve.made import record

SETTING = {"sizes": "quick", "trace": "conversation"}


def test_a_point_is_in_the_file_at_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    first = Results(file, SETTING)
    failed = record(at_s=2.0, failure=Failure("TIMEOUT", "too late"))
    first.put("a", as_rows([record([1.0, 1.5], at_s=0.5, lag_s=0.25), failed]))
    again = Results(file, SETTING)
    assert "a" in again
    assert "b" not in again
    good, bad = from_rows(again.get("a"))
    assert (good.scheduled_s, good.sent_s, good.arrivals_s, good.num_tokens) == (0.5, 0.75, (1.0, 1.5), 2)
    assert bad.failure == failed.failure
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_no_two_points_have_the_same_prompts() -> None:
    rates = (0.055, 0.06, 0.101, 0.104, 1.0, 12.0)
    seeds = {goodput.prompt_seed(seed, rate) for seed in range(3) for rate in rates}
    assert len(seeds) == 3 * len(rates)


def test_a_file_of_another_setting_is_refused_by_name(tmp_path: Path) -> None:
    Results(tmp_path / "r.json", SETTING).put("a", 1)
    with pytest.raises(BenchError, match="another sizes:"):
        Results(tmp_path / "r.json", {**SETTING, "sizes": "full"})


def test_a_broken_file_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text('{"setting": ')
    with pytest.raises(BenchError, match="cannot be read"):
        Results(file, SETTING)
    assert file.read_text() == '{"setting": '


def test_a_gap_belongs_to_the_part_in_which_it_ends() -> None:
    streamed = record([0.5, 0.9, 1.1, 1.2, 2.5])
    assert gaps_within(streamed, (1.0, 2.0)) == pytest.approx([0.2, 0.1])


def test_the_streams_rate_is_of_the_time_in_which_they_are_written() -> None:
    """Two streams at 10 tokens/s each; between two answers of the first lie 5 s of waiting."""
    tenths = [each / 10 for each in range(11)]
    streams = (record(tenths), record([6 + at for at in tenths], at_s=1.0), record(tenths))
    segment = interference.Segment((0.0, 0.0), (0.0, 10.0), streams, (), ())
    figures = loaded_figures([segment], num_streams=2)
    assert figures is not None
    assert figures.tok_s == pytest.approx(20.0)
    assert figures.longest_ms == pytest.approx(100.0)
    assert figures.ttft_p50_ms == pytest.approx(0.0)


def test_stalls_count_by_their_time() -> None:
    streamed = record([0.0, 0.05, 0.1, 0.4])
    figures = loaded_figures([interference.Segment((0, 0), (0, 1), (streamed,), (), ())], num_streams=1)
    assert figures is not None
    assert figures.stalled_share == pytest.approx(0.75)


def test_a_slow_machine_gets_more_time_between_long_prompts(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json", SETTING)
    key = interference.alone_key(System.DISAGGREGATED)
    results.put(key, as_rows([record([1.0])]))
    assert interference.fitting_interval_s(results, System.DISAGGREGATED, QUICK) == QUICK.long_every_s
    results.put(key, as_rows([record([4.6])]))
    assert interference.fitting_interval_s(results, System.DISAGGREGATED, QUICK) == 5.4


class Numbered:
    """Says which it is by its answers."""

    def __init__(self, number: int) -> None:
        self.number = number

    async def served(self) -> Served:
        return Served(str(self.number), None, None)

    async def send(self, request: PlannedRequest, on_tokens: Callable[[], None]) -> Answer:
        return Answer(None, None, self.number)


async def test_two_servers_are_asked_in_turn() -> None:
    both = RoundRobin([Numbered(1), Numbered(2)])
    assert (await both.served()).model == "1"
    request = PlannedRequest(0.0, (1,), 1, 1)
    assert [(await both.send(request, lambda: None)).num_tokens for _ in range(4)] == [1, 2, 1, 2]


def fill(results: Results) -> None:
    """What a run would have measured: 1P1D keeps to the objectives up to 1 request/s, the other to none."""
    steps = [[batch, context, 0.01] for batch in (1, 8) for context in (64, 512)]
    for condition in phase_rates.CONDITIONS:
        point = {"prefills": [[16, 0.02], [2048, 2.0]], "steps": steps}
        results.put(phase_rates.key(condition), point)
    good, late = as_rows([record([0.1, 0.11, 0.12])]), as_rows([record([9.0, 9.01, 9.02])])
    for system in (System.DISAGGREGATED, System.COLOCATED):
        results.put(unloaded.key(system), [{**good[0], "num_prompt_tokens": 16}, *late])
        for order in Ordering:
            is_good = system is System.DISAGGREGATED
            results.put(goodput.key(system, order, 0, 1.0), good if is_good else late)
            results.put(goodput.key(system, order, 0, 2.0), late)


def test_rates_lie_around_what_the_ideal_carries_or_what_the_core_can_do() -> None:
    wanted = _wanted(_parser().parse_args(["--cores", "0,1"]))
    load = TraceLoad(wanted)
    steps = [StepTime(batch, context, 0.01) for batch in (1, 8) for context in (64, 512)]

    def around(seconds_a_token: float) -> tuple[list[float], Crossing]:
        prefills = [PrefillTime(length, length * seconds_a_token) for length in (100, 1000)]
        times = PhaseTimes(prefills, steps)
        rates = goodput.rates_around_ideal(times, load)
        assert len(set(rates)) == 6
        grid = tuple(each / 2 for each in range(1, 12))
        return rates, goodput.ideal(times, Ordering.SHORTEST, load, grid, SLOS[1])

    rates, found = around(0.0003)
    assert found.rate is not None
    assert rates[0] < found.rate < rates[-1]
    assert all(high / low > 1.05 for low, high in itertools.pairwise(rates))
    # No rate is low enough here, and the core can prefill one request in 20 s.
    rates, found = around(0.02)
    assert found.rate is None
    assert 0 < rates[0] < rates[-1] < 0.1


def test_the_ideal_is_asked_for_the_same_as_the_systems() -> None:
    load = TraceLoad(_wanted(_parser().parse_args(["--quick", "--cores", "0,1"])))
    real, outlined = load.at(0.7, 1000, seed=3).requests, load.outlined(0.7)
    assert [replace(each, prompt=()) for each in real] == list(outlined)


@pytest.mark.parametrize("system", [each for each in System if each is not System.VLLM])
@pytest.mark.parametrize("order", list(Ordering))
def test_every_cluster_that_is_compared_is_one_that_starts(
    system: System, order: Ordering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_cluster.os, "getpid", lambda: 4194303)  # Linux has no larger one
    name = own_cluster.cluster_name(f"{system.value}-{order.value}")
    config = ClusterConfig.model_validate({**systems._config(system, order), "name": name})
    assert "4194303" in config.name


def test_every_system_is_visited_once_for_each_seed_and_measured_unloaded_once() -> None:
    wanted = _wanted(_parser().parse_args(["--cores", "0,1", "--rates", "1,2"]))
    visits = _visits(wanted)
    assert len(visits) == 2 * 2 * 3
    points = [point for visit in visits for point in _points(visit, wanted.sizes, wanted.rates or ())]
    assert len(points) == len(set(points)) == _num_points(wanted) - len(phase_rates.CONDITIONS)
    assert sum(point.startswith("goodput/") for point in points) == 2 * len(visits)
    assert [visit.seed for visit in visits] == [0] * 6 + [1] * 6


def test_the_report_is_made_of_the_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "r.json", tmp_path / "p.png"
    arguments = ["--quick", "--report", "--rates", "1,2", "--cores", "0,1", "--output", str(file)]
    wanted = _wanted(_parser().parse_args(arguments))
    results = Results(file, setting(wanted, TraceLoad(wanted)))
    note_run(results, 0.25)
    fill(results)
    before = file.read_bytes()
    assert main([*arguments, "--parts", "goodput", "--plot", str(picture)]) == 0
    told = capsys.readouterr().out
    assert "0.2 processes wanted a core when it began" in told
    assert "| 1P1D, shortest | 1.10 | 1.10 | 1.10 |" in told
    assert "| two colocated, fcfs | < 1 | < 1 | < 1 |" in told
    assert "| fcfs / two colocated, fcfs | > 1.10 | > 1.10 | > 1.10 |" in told
    assert picture.stat().st_size > 0
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--systems", "vllm"], "--vllm-python"),
        (["--cores", "0"], "two cores"),
        (["--trace", "/nowhere.csv"], "cannot be read"),
        (["--plot", "picture.gif"], "a plot's file ends in"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main([*arguments, "--output", str(tmp_path / "r.json")]) == 1
    assert told in capsys.readouterr().err
