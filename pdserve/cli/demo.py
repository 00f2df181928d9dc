"""`pdserve demo`: what `make demo` runs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pdserve
from cluster import ending
from cluster.config import ClusterConfig, split_address
from cluster.config_file import load_config
from cluster.errors import ClusterError
from cluster.state import find_cluster, read_record
from pdserve.cli.answer import timings_table
from pdserve.cli.console import err, out
from pdserve.cli.generate import stream
from pdserve.cli.steps import shown_steps
from pdserve.cli.target import Target
from pdserve.cli.up import interrupted
from pdserve.client import ChatMessage, GenerateOptions

QUESTION = "What is the capital of France?"
_CONFIG_FILE = Path(pdserve.__file__).parents[1] / "cluster_configs" / "local-cpu.yaml"
_TIMEOUT_S = 60.0


def demo() -> None:
    """Start one prefill and one decode worker, stream an answer, show who did what, end everything."""
    config = _own_config(load_config(_CONFIG_FILE))
    signal.signal(signal.SIGTERM, interrupted)
    with shown_steps() as tell:
        from cluster import launch  # heavy

        launched = launch.up(config, tell)
    try:
        out.print(f"\n[bold]{QUESTION}[/]")
        options = GenerateOptions(temperature=0.0, max_tokens=64)
        prompt = [ChatMessage("user", QUESTION)]
        answers = asyncio.run(stream(Target(launched.router), prompt, options, _TIMEOUT_S, live=True))
        out.print()
        out.print(timings_table(answers))
        out.print()
    finally:
        ending.down(find_cluster(launched.name), err.print)
        err.print("everything that was started has been ended")
    if "Paris" not in answers[0].text:
        raise ClusterError(f"the answer should name Paris: {answers[0].text!r}")


def _own_config(config: ClusterConfig) -> ClusterConfig:
    """A name of its own, and a free port where the file's is taken."""
    known = read_record("demo")
    is_taken = known is not None and (known.is_elsewhere or known.is_running())
    name = f"demo-{os.getpid()}" if is_taken else "demo"
    host, port = split_address(config.router.grpc)
    router = config.router.model_copy(update={"grpc": f"{host}:{_free_port(host, port)}", "http": None})
    return config.model_copy(update={"name": name, "router": router})


def _free_port(host: str, wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ClusterError(f"{host} has no free port")
