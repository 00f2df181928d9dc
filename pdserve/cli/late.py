"""Why a request was not done in time: gRPC ends it at the client, which does not know what it waited for."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from pdserve.cli.target import Target
from pdserve.client import Cluster, DeadlineExceeded, PdserveError, Pool, WorkerState

# The time that was given is over: this is on top of it.
_TIMEOUT_S = 2.0
T = TypeVar("T")


async def saying_why_late(target: Target, work: Awaitable[T]) -> T:
    """What `work` gives. Its DeadlineExceeded names the pools that have nobody to work."""
    try:
        return await work
    except DeadlineExceeded as error:
        if error.reason != DeadlineExceeded.default_reason:
            raise
        told = [each for each in await _lacks(target) if each not in error.message]
        if not told:
            raise
        raise DeadlineExceeded(f"{error.message}: {' and '.join(told)}") from error


async def _lacks(target: Target) -> list[str]:
    """Nothing where the router does not say."""
    try:
        async with target.client() as client:
            return lacks(await client.get_cluster(timeout=_TIMEOUT_S))
    except PdserveError:
        return []


def lacks(cluster: Cluster) -> list[str]:
    return [
        _lack(pool) for pool in cluster.pools if all(w.state is not WorkerState.READY for w in pool.workers)
    ]


def _lack(pool: Pool) -> str:
    name = pool.role.value
    return f"{name} is scaled to 0" if pool.target == 0 else f"no {name} worker is ready"
