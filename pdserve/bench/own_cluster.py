"""A cluster of the benchmark's own, by the commands that users type: `pdserve up` and `pdserve down`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from cluster import ending
from cluster.state import read_record
from pdserve.bench.child import running
from pdserve.bench.errors import BenchError

_PDSERVE = (sys.executable, "-m", "pdserve.cli.main")
_HOST = "127.0.0.1"
_MAX_NAME = 32


@contextmanager
def own_cluster(part: str, config: Mapping[str, object], say: Callable[[str], None]) -> Iterator[str]:
    """Yields the router's address; `config` lacks the name, and its router the address. Ends it all,
    whatever happens. Raises BenchError where it does not start.
    """
    name = cluster_name(part)
    address = f"{_HOST}:{free_port()}"
    router = config.get("router")
    whole = {
        **config,
        "name": name,
        "router": {**(router if isinstance(router, Mapping) else {}), "grpc": address},
    }
    say(f"starting a cluster: {part}")
    try:
        with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
            file = Path(folder) / "cluster.yaml"
            file.write_text(yaml.safe_dump(whole), encoding="utf-8")
            _up(file)
        yield address
    finally:
        record = read_record(name)
        if record is not None:
            ending.down(record, say)


def cluster_name(part: str) -> str:
    """One that the configuration allows, however long the part's; no other process has it."""
    return f"bench-{os.getpid()}-{part}"[:_MAX_NAME].rstrip("-")


def _up(file: Path) -> None:
    with running(lambda: _start_up(file), _end_up) as process:
        _, told = process.communicate()
    if process.returncode != 0:
        lines = [line for line in told.splitlines() if line.strip()]
        raise BenchError(lines[-1].removeprefix("error: ") if lines else "the cluster did not start")


def _start_up(file: Path) -> subprocess.Popen[str]:
    """In a session of its own: Ctrl-C is ours to handle."""
    return subprocess.Popen(
        [*_PDSERVE, "up", str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _end_up(process: subprocess.Popen[str]) -> None:
    """When it is interrupted, it ends what it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
