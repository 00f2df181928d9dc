"""What `status` and `generate --explain` make of what the router says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from pdserve.cli.answer import Answer, as_object, timings_table
from pdserve.cli.console import out
from pdserve.cli.late import lacks
from pdserve.cli.room import lack_of_memory
from pdserve.cli.status import as_object as status_object
from pdserve.cli.status import engine_lines, pool_lines, quarantine_lines, route_lines, router_lines, show
from pdserve.cli.watching import Steps, wait_until_settled
from pdserve.client import (
    Client,
    Cluster,
    Finished,
    FinishReason,
    PdserveError,
    Pool,
    Role,
    Router,
    Started,
    Timings,
    Usage,
    Worker,
    WorkerState,
)
from pdserve.cluster_results import (
    KVRoute,
    Quantiles,
    Quarantine,
    RouterLoad,
    TransferCounters,
    WorkerCounters,
    WorkerLimits,
    WorkerLoad,
)

LOAD = RouterLoad(3, 1, 10_000, 7, 120.0, 45.5, Quantiles(7, 210.0, 480.0), Quantiles(90, 11.2, 25.0))


def worker(
    role: Role, state: WorkerState, speculation: str | None = None, kernels: str = "compiled"
) -> Worker:
    limits, load = WorkerLimits(2048, 16, 64, 888, 2048, 1), WorkerLoad(1, 2, 0, 800, 77, 0, 0, 0)
    counters = WorkerCounters(12345, 6789, 0, 0, 0, 0, 10**9, 0, 0)
    at = ("127.0.0.1:9", 4711, "127.0.0.1", "cpu")
    name, told = f"{role.value}-0", {"kernels": kernels, "speculation": speculation}
    return Worker(name, "i", role, state, "", *at, limits, load, counters, **told)


def pool(role: Role, target: int, *states: WorkerState, reason: str | None = None) -> Pool:
    return Pool(role, target, tuple(worker(role, state) for state in states), reason)


def test_routers_are_listed_where_there_are_several_or_one_is_away() -> None:
    one = Router("router-0", "127.0.0.1:1", None, "", 7)
    two = Router("router-1", "127.0.0.1:2", "127.0.0.1:3", "is being started again", None)
    assert router_lines(replace(cluster(), routers=(one,))) == []
    assert router_lines(replace(cluster(), routers=(one, two))) == [
        "router-0 gRPC 127.0.0.1:1",
        "router-1 gRPC 127.0.0.1:2  HTTP http://127.0.0.1:3: is being started again",
    ]
    assert router_lines(replace(cluster(), routers=(two,)))
    closed = router_lines(replace(cluster(), routers=(one, two), router_tls=True))
    assert "HTTP https://127.0.0.1:3:" in closed[1]
    told = cast(list[dict[str, object]], status_object(replace(cluster(), routers=(one, two)))["routers"])
    assert told[1] == {
        "id": "router-1",
        "grpc": "127.0.0.1:2",
        "http": "127.0.0.1:3",
        "detail": "is being started again",
        "pid": None,
    }


def cluster(*pools: Pool) -> Cluster:
    return Cluster("x", 1, "a-model", "127.0.0.1:1", None, pools, LOAD)


NGRAM = "ngram, up to 8 tokens"
READY, DEAD, STARTING = WorkerState.READY, WorkerState.DEAD, WorkerState.STARTING


def test_each_pool_has_a_line_that_says_whether_requests_wait() -> None:
    prefill = pool(Role.PREFILL, 1, READY)
    assert pool_lines(cluster(prefill, pool(Role.DECODE, 1, READY))) == ["prefill 1 of 1", "decode 1 of 1"]
    waiting = ["prefill 1 of 1", "decode 0 of 0: requests wait"]
    assert pool_lines(cluster(prefill, pool(Role.DECODE, 0))) == waiting
    starting = pool(Role.DECODE, 2, STARTING)
    assert pool_lines(cluster(prefill, starting))[1] == "decode 0 of 2: requests wait"
    # The colocated workers serve them, and a pool that cannot recover has its own line.
    assert pool_lines(cluster(prefill, starting, pool(Role.COLOCATED, 1, READY)))[1] == "decode 0 of 2"
    assert pool_lines(cluster(prefill, pool(Role.DECODE, 1, reason="no node")))[1] == "decode 0 of 1"


def test_a_name_with_brackets_is_shown_as_it_is() -> None:
    with out.capture() as captured:
        show(replace(cluster(), model="/models/a[awq]", router_grpc="[fd00::1]:50051"))
    assert captured.get() == "x  model /models/a[awq]  gRPC [fd00::1]:50051\n"


@pytest.mark.parametrize("width", [20, 80, 200])
def test_no_name_and_no_figure_is_cut_off(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(out, "_width", width)
    with out.capture() as captured:
        show(cluster(pool(Role.PREFILL, 1, READY), pool(Role.DECODE, 1, READY)))
    (row,) = (line for line in captured.get().splitlines() if line.startswith("prefill-0"))
    assert " ".join(row.split()) == "prefill-0 READY 4711 1 2 77/888 12345 6789 0.0M 0.0M 1000M"


def test_a_dead_worker_has_no_numbers() -> None:
    shown = {}
    for state in (READY, STARTING, DEAD):
        with out.capture() as captured:
            show(cluster(pool(Role.COLOCATED, 1, state)))
        (row,) = (line for line in captured.get().splitlines() if line.startswith("colocated-0"))
        shown[state] = row.split()
    assert shown[DEAD] == ["colocated-0", "DEAD"]
    assert shown[STARTING] == ["colocated-0", "STARTING", "4711"]
    assert "12345" in shown[READY]


def test_drafts_are_shown_where_any_are_to_be_made() -> None:
    workers = (worker(Role.DECODE, READY, NGRAM), worker(Role.DECODE, DEAD, NGRAM))
    for shown, is_told in ((workers, True), ((worker(Role.DECODE, READY),), False)):
        with out.capture() as captured:
            show(cluster(Pool(Role.DECODE, 2, shown, None)))
        assert ("drafts right" in captured.get()) == is_told
        assert (NGRAM in captured.get()) == is_told
        assert ("0/0" in captured.get()) == is_told


def test_what_computes_is_shown_alike_in_one_line() -> None:
    prefill, decode = worker(Role.PREFILL, READY), worker(Role.DECODE, READY, NGRAM)
    alike = cluster(Pool(Role.PREFILL, 1, (prefill,), None), Pool(Role.DECODE, 1, (decode,), None))
    assert engine_lines(alike) == ["kernels: compiled", f"speculation of decode-0: {NGRAM}"]
    decode = worker(Role.DECODE, READY, kernels="torch: there is no GNU C++ compiler")
    differing = cluster(Pool(Role.PREFILL, 1, (prefill,), None), Pool(Role.DECODE, 1, (decode,), None))
    assert engine_lines(differing) == [
        "kernels of prefill-0: compiled",
        "kernels of decode-0: torch: there is no GNU C++ compiler",
    ]
    starting = worker(Role.DECODE, STARTING, kernels="")
    assert engine_lines(cluster(Pool(Role.DECODE, 1, (starting,), None))) == []
    told = status_object(differing)["pools"]["decode"]["workers"][0]  # type: ignore[index]
    assert (told["kernels"], told["speculation"]) == ("torch: there is no GNU C++ compiler", None)


def test_how_kv_goes_is_shown_by_the_workers_names() -> None:
    routes = (KVRoute("d", "shm"), KVRoute("gone", "grpc"))
    prefill = replace(worker(Role.PREFILL, READY), kv_routes=routes)
    arrived = TransferCounters("shm", 4, 1000, 8.0, 0, num_started=2, handover_ms=3.0, decode_start_ms=5.0)
    decode = replace(worker(Role.DECODE, READY), instance_id="d", transfers=(arrived,))
    shown = cluster(Pool(Role.PREFILL, 1, (prefill,), None), Pool(Role.DECODE, 1, (decode,), None))
    assert route_lines(shown) == [
        "KV of prefill-0 goes to decode-0 by shm",
        "KV to decode-0 by shm: whole 1.5 ms after the first token, first step after 2.5 ms (means of 2)",
    ]
    pools = status_object(shown)["pools"]
    assert isinstance(pools, dict)
    assert pools["prefill"]["workers"][0]["kv_routes"] == [{"to": "decode-0", "transport": "shm"}]
    assert pools["decode"]["workers"][0]["transfers"][0]["num_bytes"] == 1000
    assert route_lines(cluster(pool(Role.PREFILL, 1, READY))) == []


def test_who_keeps_blocks_from_being_used_is_shown() -> None:
    prefill = worker(Role.PREFILL, READY)
    waits = (Quarantine(prefill.pid, 3, 4200), Quarantine(99999, 1, 900))
    decode = replace(worker(Role.DECODE, READY), node=prefill.node, pid=prefill.pid + 1, quarantines=waits)
    shown = cluster(Pool(Role.PREFILL, 1, (prefill,), None), Pool(Role.DECODE, 1, (decode,), None))
    assert quarantine_lines(shown) == [
        "decode-0: 3 KV blocks have waited 4 s for prefill-0, which might still write them",
        "decode-0: 1 KV blocks have waited 1 s for process 99999, which might still write them",
    ]


def answer(
    reason: FinishReason,
    num_resumes: int = 0,
    stop: str | None = None,
    token: int | None = None,
    num_drafts: int = 0,
) -> Answer:
    finished = Finished(
        index=0,
        finish_reason=reason,
        matched_stop=stop,
        matched_token_id=token,
        usage=Usage(5, 0, 12, num_drafts, num_drafts // 2),
        timings=Timings(1, 2, 3, 4000, 5, 6, 7, 8, 9, 3000, 0.5),
        num_resumes=num_resumes,
        prefill_worker="prefill-1",
        decode_worker="decode-1",
    )
    return Answer(0, Started(0, 5, 0, "prefill-0", "decode-0", "r"), finished)


def explained(of: Answer) -> dict[str, str]:
    with out.capture() as captured:
        out.print(timings_table([of]))
    rows = (line.split("  ", 1) for line in captured.get().splitlines())
    return {name: " ".join(rest.split()) for name, rest in rows}


def test_json_says_who_finished_and_how_often_it_was_resumed() -> None:
    told = as_object(answer(FinishReason.EOS, num_resumes=2), with_logprobs=False)
    assert (told["prefill_worker"], told["decode_worker"]) == ("prefill-1", "decode-1")
    assert told["num_resumes"] == 2
    assert as_object(answer(FinishReason.EOS), with_logprobs=False)["num_resumes"] == 0


def test_explain_says_who_finished_after_a_resume() -> None:
    rows = explained(answer(FinishReason.EOS, num_resumes=2))
    assert rows["resumed"] == "2 times begun on prefill-0 → decode-0; those below finished it"
    assert rows["prefill"].startswith("prefill-1 ")
    assert rows["decode"].startswith("decode-1 ")
    assert rows["KV shipped"].startswith("prefill-1 → decode-1 ")
    assert "resumed" not in explained(answer(FinishReason.EOS))


def test_explain_says_what_of_the_transfer_was_hidden() -> None:
    told = explained(answer(FinishReason.EOS))["KV shipped"]
    assert told.endswith(
        "0.00 MB in 3.0 ms, 75% before the first token; decoding began 9.0 ms after that token"
    )


def test_drafts_are_told_where_there_were_any() -> None:
    drafted = answer(FinishReason.EOS, num_drafts=20)
    assert explained(drafted)["drafts"] == "decode-1 10 of 20 guessed tokens were right"
    assert "drafts" not in explained(answer(FinishReason.EOS))
    usage = as_object(drafted, with_logprobs=False)["usage"]
    assert usage == {
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "completion_tokens": 12,
        "draft_tokens": 20,
        "accepted_draft_tokens": 10,
    }


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (answer(FinishReason.LENGTH), "length 12 tokens were the limit"),
        (answer(FinishReason.EOS, token=2), "eos the model ended its answer (token id 2)"),
        (answer(FinishReason.STOP, stop="\n\n"), r"stop at the stop text '\n\n'"),
        (answer(FinishReason.STOP, stop="[/INST]"), "stop at the stop text '[/INST]'"),
        (answer(FinishReason.STOP, stop="[end]"), "stop at the stop text '[end]'"),
        (answer(FinishReason.STOP, token=13), "stop at a stop token (token id 13)"),
    ],
)
def test_explain_says_why_the_answer_ended(ended: Answer, told: str) -> None:
    assert explained(ended)["end"] == told


class _Unchanging:
    """A client of a cluster that never gets anywhere."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def get_cluster(self, *, timeout: float) -> Cluster:
        return self._cluster


def test_who_no_longer_waits_is_told_that_it_goes_on() -> None:
    seen = cluster(pool(Role.DECODE, 1, STARTING))
    waiting = wait_until_settled(cast(Client, _Unchanging(seen)), {Role.DECODE}, Steps(seen), timeout_s=0.25)
    told = r"not done after 0\.25 s; it goes on in the background, see pdserve status; decode-0"
    with pytest.raises(PdserveError, match=told):
        asyncio.run(waiting)


def test_a_late_answer_names_the_pools_without_a_ready_worker() -> None:
    ready, starting = WorkerState.READY, WorkerState.STARTING
    assert lacks(cluster(pool(Role.PREFILL, 2, starting, ready), pool(Role.DECODE, 1, ready))) == []
    assert lacks(cluster(pool(Role.PREFILL, 1, starting), pool(Role.DECODE, 0))) == [
        "no prefill worker is ready",
        "decode is scaled to 0",
    ]


def test_more_workers_than_the_memory_holds_are_warned_of() -> None:
    """Each of those that run has 1 GB."""
    ready = WorkerState.READY
    now = cluster(pool(Role.PREFILL, 1, ready), pool(Role.DECODE, 2, ready, ready))
    assert lack_of_memory(now, {Role.DECODE: 6}, free_bytes=4 * 10**9) is None
    told = lack_of_memory(now, {Role.DECODE: 7}, free_bytes=4 * 10**9)
    assert told is not None
    assert told.startswith("5 more in decode, each about 0.9 GiB as those that run, want 4.7 GiB")
    assert lack_of_memory(now, {Role.DECODE: 0}, free_bytes=0) is None
    # Of a pool without workers the others tell; without any nobody does.
    empty = cluster(pool(Role.PREFILL, 1, ready), pool(Role.DECODE, 0))
    assert lack_of_memory(empty, {Role.DECODE: 1}, free_bytes=10**8) is not None
    assert lack_of_memory(cluster(pool(Role.DECODE, 0)), {Role.DECODE: 9}, free_bytes=0) is None
