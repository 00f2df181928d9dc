"""A router's process is killed: what it held on the workers is freed, and another router's requests go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.client import Client, Delta, Unavailable
from router.events import Moment
from tests.faults.fleet import fleet
from tests.faults.router_processes import launch_router
from tests.faults.worker_processes import has_nothing
from tests.unit.engine.driving import Reference, prompt
from worker.identity import Role

pytestmark = pytest.mark.timeout(300)  # processes start, which takes long where much else runs


async def test_a_killed_routers_work_is_freed_and_another_routers_goes_on(
    folder: Path, reference: Reference, tmp_path: Path
) -> None:
    async with fleet(folder, "grpc", {Role.PREFILL: 1, Role.DECODE: 1}) as (cluster, client):
        config = cluster.router.config.model_copy(update={"router_id": "router-1"})
        async with launch_router(tmp_path, config) as doomed, Client(doomed.address) as others:
            decoding = others.generate_stream(
                prompt(40, 1), max_tokens=1000, temperature=0, ignore_eos=True, timeout=60
            )
            async for event in decoding:
                if isinstance(event, Delta):
                    break
            long = others.generate(
                prompt(1900, 2), max_tokens=100, timeout=60, temperature=0, request_id="long"
            )
            prefilling = asyncio.ensure_future(long)
            await doomed.moment("long", Moment.PREFILL_BEGIN, 30.0)
            ids = prompt(60, 3)
            mine = client.generate(ids, max_tokens=60, temperature=0, ignore_eos=True, timeout=60)
            answering = asyncio.ensure_future(mine)
            for worker in cluster.workers.values():
                await worker.until(lambda status: not has_nothing(status), 20.0)
            doomed.process.kill()
            with pytest.raises(Unavailable):
                await prefilling
            with pytest.raises(Unavailable):
                async for _ in decoding:
                    pass
            answer = await answering
            reference.assert_follows(ids, answer.token_ids)
            assert answer.completions[0].num_resumes == 0
        await cluster.until_nothing_is_held()
