"""A scripted colocated worker as a process of its own, which a test may stop and kill.

Prints its WorkerStatus as hex on one line; ends when its stdin closes.
"""

from __future__ import annotations

import asyncio
import sys

from pdserve.v1 import cluster_pb2
from tests.scripted_workers import ScriptedDecode


async def main(name: str) -> None:
    worker = ScriptedDecode(name, cluster_pb2.ROLE_COLOCATED, step_s=0.02)
    await worker.start()
    sys.stdout.write(worker.status().SerializeToString().hex() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
