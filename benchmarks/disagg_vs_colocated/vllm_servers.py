"""vLLM's own OpenAI servers, one on each core, in an interpreter of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from benchmarks.disagg_vs_colocated.cores import confined
from benchmarks.disagg_vs_colocated.settings import MAX_MODEL_LEN, MAX_NUM_SEQS, MODEL
from engine.weights import resolve_model
from pdserve.bench.child import running
from pdserve.bench.errors import VllmError
from pdserve.bench.own_cluster import free_port

# Of our own interpreter, not of another's.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_START_WITHIN_S = 600.0
_END_WITHIN_S = 20.0
_ASK_EVERY_S = 1.0
_MAX_WORDS = 300
# A proxy in the environment is for the world outside.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def vllm_servers(
    interpreter: Path, cores: Sequence[int], kv_mib: int, say: Callable[[str], None]
) -> Iterator[list[str]]:
    """Yields their URLs. Ends them all, whatever happens. Raises VllmError."""
    folder = resolve_model(MODEL, say)
    say("starting vLLM's servers, which takes a minute or two")
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-")))
        started = []
        for core in cores:
            port, log = free_port(), logs / f"{core}.log"
            file = stack.enter_context(log.open("wb"))
            with confined([core]):
                process = stack.enter_context(
                    running(_starting(interpreter, folder, port, core, kv_mib, file), _end)
                )
            started.append((process, port, log))
        for process, port, log in started:
            _wait(process, port, log)
        yield [f"http://127.0.0.1:{port}" for _, port, _ in started]


def _starting(
    interpreter: Path, folder: Path, port: int, core: int, kv_mib: int, log: IO[bytes]
) -> Callable[[], subprocess.Popen[str]]:
    command = [
        *(str(interpreter), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)),
        "--no-enable-prefix-caching",
    ]

    def start() -> subprocess.Popen[str]:
        """In a session of its own: Ctrl-C is ours to handle, and all that it starts can be ended with it."""
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=_environment(core, kv_mib),
                start_new_session=True,
            )
        except OSError as error:
            raise VllmError(f"{interpreter} cannot be run: {error.strerror}") from error

    return start


def _environment(core: int, kv_mib: int) -> Mapping[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name not in _OURS},
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(-(-kv_mib // 1024)),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "OMP_NUM_THREADS": "1",
    }


def _wait(process: subprocess.Popen[str], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_WITHIN_S
    while not _is_healthy(port):
        try:
            code = process.wait(_ASK_EVERY_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline:
                continue
            raise VllmError(f"vLLM does not answer within {_START_WITHIN_S:g} s{_last_words(log)}") from None
        raise VllmError(f"vLLM ended with exit code {code}{_last_words(log)}")


def _is_healthy(port: int) -> bool:
    try:
        with _OPENER.open(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line] or lines
    return f": {told[-1][:_MAX_WORDS]}" if told else ""


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it started, which is in its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            pass  # below
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of them have ended
    process.wait()
