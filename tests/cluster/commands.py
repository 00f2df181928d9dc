"""The real command line in processes of its own, with its records in a folder of the test's."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.nodes.processes import family
from cluster.state import ClusterRecord
from pdserve.cluster_results import Worker, WorkerState

START_TIMEOUT_S = 180.0
# Where the Rays of these tests put their folders; short, since Unix sockets lie in them.
TEMP = Path(tempfile.mkdtemp(prefix="pdt-", dir="/tmp"))
atexit.register(shutil.rmtree, TEMP, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Commands:
    """`pdserve …` for one state folder."""

    home: Path
    # Ray lets its workers import from where `up` ran.
    cwd: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.home), "TMPDIR": str(TEMP)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pdserve.cli.main", *arguments],
            cwd=self.cwd,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, timeout_s: float = START_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def succeed(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def fail(self, *arguments: str) -> str:
        """What it said on stderr; exit code 1, no stack, and nothing on stdout."""
        done = self.run(*arguments)
        assert done.returncode == 1, f"{arguments}: {done.returncode} {done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        return done.stderr

    def record(self, name: str) -> ClusterRecord | None:
        path = self.home / "pdserve" / name / "cluster.json"
        return ClusterRecord.model_validate_json(path.read_bytes()) if path.exists() else None

    def processes(self, name: str) -> list[psutil.Process]:
        """All of a running cluster."""
        record = self.record(name)
        return family(record.processes, record.session) if record is not None else []

    def worker(self, pool: str, index: int = 0) -> dict[str, int]:
        status = json.loads(self.succeed("status", "--json"))
        worker: dict[str, int] = status["pools"][pool]["workers"][index]
        return worker


def write_config(
    folder: Path,
    name: str,
    port: int,
    model: str = "smollm2-135m",
    more: str = "",
    http_port: int | None = None,
) -> Path:
    path = folder / f"{name}.yaml"
    http = "" if http_port is None else f', http: "127.0.0.1:{http_port}"'
    path.write_text(
        f"""\
name: {name}
model: {{id: "{model}", max_model_len: 2048}}
router: {{grpc: "127.0.0.1:{port}"{http}}}
pools:
  prefill: {{engine: {{kv_cache: 128MiB}}}}
  decode: {{engine: {{kv_cache: 128MiB}}}}
{more}"""
    )
    return path


def is_ready(worker: Worker) -> bool:
    return worker.state is WorkerState.READY


def temp_folders() -> set[Path]:
    """The folders of the Rays and of the workers' sockets that these tests started."""
    return {*TEMP.glob("pds-*"), *TEMP.glob("pdserve-kv-*")}


def leftovers(home: Path) -> list[str]:
    """All who were started with this state folder: it is in their environment or in their arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("XDG_STATE_HOME", "")]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if process.pid != os.getpid() and any(str(home) in word for word in words):
            found.append(" ".join(words))
    return found
