"""What the commands that put a cluster to the test may be told alike."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.under_faults.serving import TINY


def parser(command: str, description: str | None, num_workers: int) -> argparse.ArgumentParser:
    """`num_workers`: of each pool, if nothing else is said."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--model", default="smollm2-135m", help=f"a model.id, or {TINY}")
    add("--prefill", type=int, default=num_workers, help="workers at the start")
    add("--decode", type=int, default=num_workers)
    add("--clients", type=int, default=8)
    add("--timeout", type=float, default=300.0, help="of a request, in seconds")
    add("--transport", default="auto", help="kv_transfer.transport")
    add("--kv-cache", default="256MiB", help="of each worker")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE")
    return made
