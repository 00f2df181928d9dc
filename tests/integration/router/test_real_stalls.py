"""Real workers drain and stall in the middle of answers: the model's tokens come, and no retry is paid."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import grpc
import pytest

from decode_worker.worker import DecodeWorker
from engine.loading import LoadedModel
from pdserve.client import Generation
from pdserve.v1 import cluster_pb2, errors, worker_pb2, worker_pb2_grpc
from router.fleet.worker_info import WorkerState
from tests.integration.router.harness import until
from tests.integration.workers.conftest import folder, loaded, reference
from tests.serving import Serving, Worker, serving
from tests.trusted import TRUST
from tests.unit.engine.driving import Reference, prompt
from trust.channels import open_aio_channel
from worker.identity import Role

__all__ = ["folder", "loaded", "reference"]

P, D = Role.PREFILL, Role.DECODE
PROMPT = prompt(40)
NUM_TOKENS = 400
PAYING_NOTHING: dict[str, object] = {"retry_budget": 0}


async def streaming(made: Serving) -> tuple[asyncio.Future[Generation], DecodeWorker]:
    generate = made.client.generate(
        PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, timeout=100
    )
    work = asyncio.ensure_future(generate)
    decodes = [worker for worker in made.of(D) if isinstance(worker, DecodeWorker)]
    await until(lambda: any(w.describe().counters.tokens_decoded > 20 for w in decodes), 60.0)
    return work, next(w for w in decodes if w.describe().load.num_running)


def mark(made: Serving, worker: Worker, state: cluster_pb2.WorkerState) -> list[cluster_pb2.PoolStatus]:
    """What the controller would say with that worker in that state."""
    pools = {role: cluster_pb2.PoolStatus(role=role) for role in (1, 2)}
    for each in made.workers:
        status = each.describe()
        if each is worker:
            status.state = state
        pools[status.role].workers.append(status)
    return list(pools.values())


async def test_what_still_runs_when_a_drains_time_is_over_moves_and_nothing_is_lost(
    folder: Path, loaded: LoadedModel, reference: Reference
) -> None:
    async with serving(folder, loaded, (P, D, D), router=PAYING_NOTHING) as made:
        work, busy = await streaming(made)
        await made.control.show(mark(made, busy, cluster_pb2.WORKER_STATE_DRAINING))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(busy.drain(), 0.05)
        await busy.stop()
        answer = await work
        reference.assert_follows(PROMPT, answer.token_ids)
        assert len(answer.token_ids) == NUM_TOKENS
        assert answer.decode_worker != busy.identity.worker_id
        assert answer.completions[0].num_resumes == 1
        made.workers.remove(busy)


async def test_a_prefill_worker_whose_drains_time_is_over_loses_no_prompt(
    folder: Path, loaded: LoadedModel, reference: Reference
) -> None:
    async with serving(folder, loaded, (P, P, D), router=PAYING_NOTHING) as made:
        prompts = [prompt(200, number) for number in range(6)]
        first, let_go = made.of(P)[0], threading.Event()
        first._loop.call(lambda _: let_go.wait(60))
        work = [
            asyncio.ensure_future(
                made.client.generate(ids, max_tokens=4, temperature=0, ignore_eos=True, timeout=100)
            )
            for ids in prompts
        ]
        await until(lambda: first.describe().load.num_transfers > 0, 60.0)
        stopping = asyncio.ensure_future(first.stop())
        await asyncio.sleep(0)
        let_go.set()
        await stopping
        for ids, answer in zip(prompts, await asyncio.gather(*work), strict=True):
            reference.assert_follows(ids, answer.token_ids)
            assert answer.prefill_worker != first.identity.worker_id
        made.workers.remove(first)


async def test_one_that_has_drained_refuses_at_once_what_comes_late(
    folder: Path, loaded: LoadedModel
) -> None:
    async with serving(folder, loaded, (P, D, D)) as made:
        first = made.of(D)[0]
        await first.drain()
        async with open_aio_channel(first.describe().address, TRUST) as channel:
            stub = worker_pb2_grpc.DecodeWorkerStub(channel)
            spec = worker_pb2.SequenceSpec(transfer_id="late", epoch=1, prompt_token_ids=[1, 2])
            spec.sampling.seed, spec.stop.max_tokens = 1, 4
            mode = worker_pb2.ReserveRequest.MODE_RECEIVE_KV
            call = worker_pb2.ReserveRequest(sequence=spec, router_id="router-0", mode=mode)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Reserve(call, timeout=5)
        error = errors.from_rpc_error(refused.value)
        assert isinstance(error, errors.Unavailable)
        assert (error.reason, error.retry_after_s) == ("DRAINING", 0)
        # The router has not been told, and no request is the worse for it.
        for number in range(4):
            ids = prompt(20, number)
            answer = await made.client.generate(ids, max_tokens=3, ignore_eos=True, timeout=30)
            assert answer.decode_worker != first.identity.worker_id
            assert answer.completions[0].num_resumes == 0


async def test_an_engine_that_is_stuck_in_a_step_loses_its_streams_to_others(
    folder: Path, loaded: LoadedModel, reference: Reference
) -> None:
    router = PAYING_NOTHING | {"suspect_after_s": 2.0}
    async with serving(folder, loaded, (P, D, D), router=router) as made:
        work, busy = await streaming(made)
        let_go = threading.Event()
        busy._loop.call(lambda _: let_go.wait(60))
        try:
            answer = await asyncio.wait_for(work, 60)
        finally:
            let_go.set()
        reference.assert_follows(PROMPT, answer.token_ids)
        assert len(answer.token_ids) == NUM_TOKENS
        assert answer.completions[0].num_resumes == 1
        (seen,) = (w for w in made.router.table.all() if w.info.instance_id == busy.identity.instance_id)
        assert seen.state is WorkerState.READY
        # It goes on, and is used again.
        await until(lambda: seen.is_usable, 20.0)
