"""How long an answer pauses when the process that decodes it is stopped or killed, with another one there."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from pdserve.client import Client, Delta
from tests.faults.fleet import Fleet, fleet
from tests.integration.router.harness import until
from tests.unit.engine.driving import Reference, prompt
from worker.identity import Role

pytestmark = pytest.mark.timeout(300)  # processes start, which takes long where much else runs
NUM_TOKENS = 600
# What is promised.
LONGEST_PAUSE_S = {signal.SIGSTOP: 8.0, signal.SIGKILL: 3.0}


async def longest_pause_s(
    cluster: Fleet, client: Client, reference: Reference, blow: signal.Signals, number: int
) -> tuple[float, str]:
    """And who was struck, in the middle of an answer that comes whole."""
    ids, seen, longest_s = prompt(60, number), list[int](), 0.0
    victim: str | None = None
    last = time.monotonic()
    async for event in client.generate_stream(
        ids, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, timeout=100
    ):
        now = time.monotonic()
        if victim is not None:
            longest_s = max(longest_s, now - last)
        last = now
        seen.extend(event.token_ids if isinstance(event, Delta) else ())
        if victim is None and len(seen) > 30:
            victim = cluster.used[Role.DECODE]
            cluster.workers[victim].send(blow)
    assert len(seen) == NUM_TOKENS
    reference.assert_follows(ids, seen)
    assert victim is not None
    assert cluster.used[Role.DECODE] != victim
    return longest_s, victim


async def test_a_stream_pauses_no_longer_than_is_promised(folder: Path, reference: Reference) -> None:
    async with fleet(folder, "grpc", {Role.PREFILL: 1, Role.DECODE: 2}) as (cluster, client):
        stop, kill = signal.SIGSTOP, signal.SIGKILL
        pause_s, stopped = await longest_pause_s(cluster, client, reference, stop, 1)
        assert pause_s <= LONGEST_PAUSE_S[stop]
        # It was suspected before its connection was given up, and is used again when it goes on.
        (seen,) = (worker for worker in cluster.router.table.all() if worker.info.id == stopped)
        assert not seen.is_usable
        cluster.workers[stopped].send(signal.SIGCONT)
        await until(lambda: seen.is_usable, 60.0)
        await cluster.until_nothing_is_held(30.0)
        pause_s, killed = await longest_pause_s(cluster, client, reference, kill, 2)
        assert pause_s <= LONGEST_PAUSE_S[kill]
        await cluster.bury(killed)
        await cluster.until_nothing_is_held(30.0)
