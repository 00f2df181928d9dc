"""A real router on a core of its own, on workers that compute nothing (stub_workers.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trust.secret import Secret

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Served:
    stub: str
    grpc: str
    http: str
    process: psutil.Process


@contextmanager
def child(core: int, log: TextIO, *command: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A process of ours on that core, and the line of JSON that it says first."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    finally:
        os.sched_setaffinity(0, mine)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise RuntimeError(f"{command[0]} ended: {Path(log.name).read_text()}")
        yield process, json.loads(said)
    finally:
        process.terminate()
        process.wait(10)


def write_model(folder: Path) -> None:
    """A tokenizer of single bytes: each token is one character."""
    vocabulary = {
        character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(vocabulary)}))


@contextmanager
def stub_cluster(steps: float, num_streams: int, router_core: int, load_core: int) -> Iterator[Served]:
    """`steps`: of the decode worker a second."""
    with tempfile.TemporaryDirectory() as name, open(Path(name, "log"), "w") as log:
        folder = Path(name)
        write_model(folder)
        with child(load_core, log, "benchmarks.stub_workers", "--step-ms", str(1000 / steps)) as (_, stub):
            config = {
                "grpc": "127.0.0.1:0",
                "http": "127.0.0.1:0",
                "cluster": "stub",
                "router_id": "router-0",
                "model": "stub",
                "model_dir": name,
                "control": stub["control"],
                "trust": {"secret": str(folder / "secret")},
                "max_queued_requests": 2 * num_streams,
            }
            Secret.fresh().write(folder / "secret")
            path = folder / "router.json"
            path.write_text(json.dumps(config))
            with child(router_core, log, "router", "--config", str(path)) as (process, router):
                yield Served(stub["control"], router["grpc"], router["http"], psutil.Process(process.pid))
