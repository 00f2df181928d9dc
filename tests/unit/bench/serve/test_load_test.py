"""The whole test against scripted clients: what is checked first, and what a search asks for."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.choice import Kind, WorkloadChoice
from pdserve.bench.serve.client import Answer, RequestFailed, Served
from pdserve.bench.serve.goodput import Slo
from pdserve.bench.serve.load_test import LoadTest, Report
from pdserve.bench.serve.plot import check_can_plot, plot_report
from pdserve.bench.serve.run import NoProgress
from pdserve.bench.serve.sweep import Crossing, Point, Search
from pdserve.bench.serve.workload import PlannedRequest, Prompt


class Instant:
    """Answers at once; or refuses with `refusal`."""

    def __init__(self, max_model_len: int | None = 100) -> None:
        self.prompts: list[Prompt] = []
        self.max_model_len = max_model_len
        self.refusal: RequestFailed | None = None

    async def served(self) -> Served:
        return Served("made", self.max_model_len, 500)

    async def send(self, request: PlannedRequest, on_tokens: Callable[[], None]) -> Answer:
        if self.refusal is not None:
            raise self.refusal
        self.prompts.append(request.prompt)
        for _ in range(request.max_tokens):
            on_tokens()
        return Answer(None, None, request.max_tokens)


class Silent:
    """No progress shown; the rates are kept."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def begin(self, num_requests: int, rate: float) -> NoProgress:
        self.rates.append(rate)
        return NoProgress()


def choice(num_requests: int = 6, rate: float = 1000.0, is_text: bool = False) -> WorkloadChoice:
    return WorkloadChoice(
        num_requests=num_requests, rate=rate, num_prompt_tokens=8, num_tokens=5, is_text=is_text
    )


async def test_a_run_reports_what_was_asked_and_answered() -> None:
    client = Instant()
    report = await LoadTest(choice(), prompt_seed=1, slo=Slo(ttft_ms=60_000)).measure(client, Silent())
    (result,) = report.runs
    assert (report.served.model, report.crossing) == ("made", None)
    assert (result.summary.num_ok, result.summary.num_tokens) == (6, 30)
    assert result.workload.rate == pytest.approx(1000)
    assert result.goodput is not None
    assert result.goodput.attainment == 1.0
    # One more than the workload has: the first, which only sees whether it works.
    assert len(client.prompts) == 7


async def test_a_search_measures_each_rate_with_the_same_load_and_new_prompts() -> None:
    client, shown = Instant(), Silent()
    search = Search((500.0, 2000.0), 0.9)
    report = await LoadTest(choice(), 1, slo=Slo(ttft_ms=60_000), search=search).measure(client, shown)
    assert shown.rates == [pytest.approx(500), pytest.approx(2000)]
    slow, fast = (result.workload for result in report.runs)
    times = [[request.at_s for request in workload.requests] for workload in (slow, fast)]
    assert times[0] == pytest.approx([4 * at_s for at_s in times[1]])
    assert len(set(client.prompts)) == 1 + 2 * 6
    assert report.crossing is not None
    assert report.crossing.is_above


async def test_searches_of_neighbouring_seeds_have_no_prompt_in_common() -> None:
    client = Instant()
    for seed in (1, 2):
        search = Search((500.0, 2000.0), 0.9)
        await LoadTest(choice(), seed, slo=Slo(ttft_ms=60_000), search=search).measure(client, Silent())
    assert len(set(client.prompts)) == len(client.prompts) == 2 * (1 + 2 * 6)


async def test_a_search_takes_no_rate_for_its_own() -> None:
    """`--rate inf` is all at once, which leaves no gaps that another rate could stretch."""
    shown = Silent()
    for each in (choice(rate=math.inf), choice(rate=3.0)):
        await LoadTest(each, 1, slo=Slo(ttft_ms=60_000), search=Search((500.0, 900.0), 0.9)).measure(
            Instant(), shown
        )
    assert shown.rates == [pytest.approx(rate) for rate in (500, 900)] * 2


async def test_what_does_not_fit_is_told_before_anything_is_sent() -> None:
    client = Instant(max_model_len=12)
    with pytest.raises(BenchError, match="6 of 6 requests are longer than the 12 tokens that made takes"):
        await LoadTest(choice(), 1).measure(client, Silent())
    assert client.prompts == []


async def test_a_server_that_refuses_is_told_once() -> None:
    client = Instant()
    client.refusal = RequestFailed("401", "no key")
    with pytest.raises(BenchError, match="a first request fails with 401: no key"):
        await LoadTest(choice(), 1).measure(client, Silent())


async def test_a_workload_as_text_is_tried_and_sent_as_text() -> None:
    client = Instant()
    await LoadTest(choice(is_text=True), 1).measure(client, Silent())
    assert all(isinstance(prompt, str) for prompt in client.prompts)


async def test_a_trace_keeps_its_own_rate_if_none_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [f'{{"timestamp": {at}, "input_length": 9, "output_length": 2}}' for at in (0, 20, 100)]
    file.write_text("\n".join(rows))
    shown = Silent()
    await LoadTest(WorkloadChoice(Kind.TRACE, file), 1).measure(Instant(), shown)
    await LoadTest(WorkloadChoice(Kind.TRACE, file, rate=200), 1).measure(Instant(), shown)
    assert shown.rates == [pytest.approx(20), pytest.approx(200)]


async def test_dialogues_are_sent_as_text_with_answers_counted_by_the_tokenizer(tmp_path: Path) -> None:
    file, tokenizer = tmp_path / "dialogues.json", tmp_path / "tokenizer.json"
    turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "me and you and me"}]
    again = [{**turns[0], "value": "Which?"}, turns[1]]
    file.write_text(json.dumps([{"conversations": each} for each in (turns, again)]))
    words = Tokenizer(models.WordLevel({"me": 0, "and": 1, "you": 2}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tokenizer))
    client = Instant()
    for path in (tokenizer, tmp_path):
        wanted = WorkloadChoice(Kind.DIALOGUES, file, num_requests=2, rate=1000, tokenizer=path)
        report = await LoadTest(wanted, 1).measure(client, Silent())
        assert report.runs[0].summary.num_tokens == 2 * 5
    (first, *asked) = client.prompts[:3]
    assert (first, sorted(map(str, asked))) == ("Hello", ["Which?", "Who?"])
    assert client.prompts == [first, *asked] * 2
    tokenizer.write_text("{}")
    with pytest.raises(BenchError, match="is no tokenizer"):
        await LoadTest(wanted, 1).measure(client, Silent())


@pytest.mark.parametrize("ending", [".png", ".svg"])
async def test_both_kinds_of_report_are_plotted(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    for search in (None, Search((500.0, 2000.0), 0.9)):
        report = await LoadTest(choice(), 1, slo=Slo(ttft_ms=1000), search=search).measure(
            Instant(), Silent()
        )
        file = tmp_path / f"plot{ending}"
        plot_report(report, file)
        assert file.read_bytes().startswith(b"\x89PNG" if ending == ".png" else b"<?xml")


def test_a_plot_that_cannot_be_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, told in (
        (tmp_path / "plot.gif", "ends in .png"),
        (tmp_path / "no" / "plot.png", "no such folder"),
    ):
        with pytest.raises(BenchError, match=told):
            check_can_plot(path)
    monkeypatch.setattr("pdserve.bench.serve.plot.find_spec", lambda name: None)
    with pytest.raises(BenchError, match="a plot wants matplotlib"):
        check_can_plot(tmp_path / "plot.png")


class Sticking(Instant):
    """Answers so many requests, then none."""

    def __init__(self, num_answered: int) -> None:
        super().__init__()
        self.num_left = num_answered
        self.sticks = asyncio.Event()

    async def send(self, request: PlannedRequest, on_tokens: Callable[[], None]) -> Answer:
        if self.num_left == 0:
            self.sticks.set()
            await asyncio.Event().wait()
        self.num_left -= 1
        return await super().send(request, on_tokens)


async def interrupt(test: LoadTest, client: Sticking) -> list[Report]:
    kept: list[Report] = []
    task = asyncio.create_task(test.measure(client, Silent(), kept.append))
    await asyncio.wait_for(client.sticks.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return kept


async def test_what_had_ended_when_it_was_interrupted_is_told() -> None:
    (kept,) = await interrupt(LoadTest(choice(), 1, slo=Slo(ttft_ms=60_000)), Sticking(1 + 4))
    (run,) = kept.runs
    assert (kept.is_whole, run.summary.num_requests, run.summary.num_ok) == (False, 4, 4)
    assert [record.index for record in run.records] == [0, 1, 2, 3]
    # Of a search: the runs that were whole.
    test = LoadTest(choice(), 1, slo=Slo(ttft_ms=60_000), search=Search((500.0, 900.0, 1000.0), 0.9))
    (kept,) = await interrupt(test, Sticking(1 + 6 + 6 + 3))
    assert [run.workload.rate for run in kept.runs] == pytest.approx([500.0, 900.0])
    assert not kept.is_whole
    assert kept.crossing is not None
    assert kept.crossing.is_above


async def test_an_interrupted_search_is_told_by_the_target_and_the_rates_that_were_asked_for() -> None:
    """Of one request there is no rate to be seen."""
    test = LoadTest(choice(1), 1, slo=Slo(ttft_ms=60_000), search=Search((500.0, 900.0), 0.5))
    (kept,) = await interrupt(test, Sticking(1 + 1))
    assert kept.crossing == Crossing(None, True, (Point(500.0, 1.0),), 0.5)


class Interrupted(Sticking):
    """Ctrl-C comes in the midst of one request, while another sticks; before Python 3.11 it may."""

    async def send(self, request: PlannedRequest, on_tokens: Callable[[], None]) -> Answer:
        if self.sticks.is_set():
            await asyncio.sleep(0.2)  # until all have been sent
            raise KeyboardInterrupt
        return await super().send(request, on_tokens)


def test_what_had_ended_is_told_wherever_the_interrupt_comes() -> None:
    kept: list[Report] = []

    async def measure() -> None:
        with suppress(KeyboardInterrupt):  # asyncio.run has raised it by then
            await LoadTest(choice(), 1).measure(Interrupted(1 + 4), Silent(), kept.append)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(measure())
    assert [record.index for report in kept for record in report.runs[0].records] == [0, 1, 2, 3]


async def test_nothing_is_told_where_nothing_had_ended() -> None:
    assert await interrupt(LoadTest(choice(), 1), Sticking(1)) == []
