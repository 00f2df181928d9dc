"""Whether this machine has memory for the workers that a scale adds, as far as those that run tell."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.client import Cluster, Role, Worker


def lack_of_memory(cluster: Cluster, targets: Mapping[Role, int], free_bytes: int) -> str | None:
    """What to warn of. None: there is enough, no worker that runs tells what one takes, or they are on
    several nodes.
    """
    every = [worker for pool in cluster.pools for worker in pool.workers if worker.counters.rss_bytes]
    if len({worker.node for worker in every}) != 1:
        return None
    wanted: list[str] = []
    num_bytes = 0
    for pool in cluster.pools:
        num_more = targets.get(pool.role, pool.target) - len(pool.workers)
        if num_more > 0:
            each = _largest([worker for worker in every if worker.role is pool.role] or every)
            wanted.append(f"{num_more} more in {pool.role.value}, each about {_gib(each)} as those that run")
            num_bytes += num_more * each
    if num_bytes <= free_bytes:
        return None
    free = f"of this machine's memory {_gib(free_bytes)} are free"
    return f"{' and '.join(wanted)}, want {_gib(num_bytes)}, and {free}"


def _largest(workers: list[Worker]) -> int:
    return max(worker.counters.rss_bytes for worker in workers)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
