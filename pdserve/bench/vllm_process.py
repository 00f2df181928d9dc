"""vLLM in an interpreter of its own, asked row by row. It sleeps while nothing is asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from pdserve.bench.child import running
from pdserve.bench.errors import VllmError
from pdserve.bench.subject import Timed

# Of our own interpreter, not of another's.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_SCRIPT = Path(__file__).with_name("vllm_script.py")
_END_WITHIN_S = 10.0
_MAX_WORDS = 200


@dataclass(frozen=True, slots=True)
class VllmSettings:
    model_folder: Path
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    cores: Sequence[int]

    def argument(self) -> str:
        return json.dumps(
            {
                "model": str(self.model_folder),
                "dtype": self.dtype,
                "max_model_len": self.max_model_len,
                "max_num_seqs": self.max_num_seqs,
            }
        )

    def environment(self) -> Mapping[str, str]:
        """It is held to the same cores as we are, and asks no network."""
        return {
            **{name: value for name, value in os.environ.items() if name not in _OURS},
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(-(-self.kv_cache_bytes // 2**30)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cores)),
            "OMP_NUM_THREADS": str(len(self.cores)),
            "GOMP_CPU_AFFINITY": " ".join(map(str, self.cores)),
        }


class VllmProcess:
    """A Subject."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Waits until it has loaded its model. Raises VllmError."""
        if process.stdin is None or process.stdout is None:
            raise ValueError("its pipes are needed")
        self._process = process
        self._requests, self._answers = process.stdin, process.stdout
        self._idle_cpu_s = 0.0
        self._idle_s = 0.0
        started = self._read()
        self.version = str(started["version"])
        self.max_num_batched_tokens = int(started["max_num_batched_tokens"])
        self._fell_idle = self._clocks()

    @property
    def idle_load(self) -> float:
        """Cores that it kept busy while nothing was asked of it."""
        return self._idle_cpu_s / self._idle_s if self._idle_s else 0.0

    def prefill(self, prompt: Sequence[int]) -> Timed:
        return self._timed({"do": "prefill", "prompts": [list(prompt)]})

    def begin(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> None:
        self._ask({"do": "begin", "prompts": [list(each) for each in prompts], "num_tokens": num_new_tokens})

    def decode(self, num_steps: int) -> Timed:
        return self._timed({"do": "decode", "num_tokens": num_steps})

    def end(self) -> None:
        self._ask({"do": "end"})

    def _timed(self, request: Mapping[str, object]) -> Timed:
        answer = self._ask(request)
        return Timed(int(answer["num_tokens"]), float(answer["seconds"]))

    def _ask(self, request: Mapping[str, object]) -> Mapping[str, str]:
        self._count_idle()
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._read()
        self._fell_idle = self._clocks()
        return answer

    def _read(self) -> Mapping[str, str]:
        line = self._answers.readline()
        if not line:
            raise self._ended()
        try:
            answer = json.loads(line)
        except ValueError:
            raise VllmError(f"it answered what is no JSON: {line.strip()[:80]!r}") from None
        if "error" in answer:
            raise VllmError(answer["error"])
        return {name: str(value) for name, value in answer.items()}

    def _ended(self) -> VllmError:
        try:
            return VllmError(f"it ended with exit code {self._process.wait(_END_WITHIN_S)}")
        except subprocess.TimeoutExpired:
            return VllmError("it answers no more")

    def _count_idle(self) -> None:
        now_s, cpu_s = self._clocks()
        self._idle_s += now_s - self._fell_idle[0]
        self._idle_cpu_s += cpu_s - self._fell_idle[1]

    def _clocks(self) -> tuple[float, float]:
        """Now, and the time that it has spent on cores."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.NoSuchProcess:
            raise self._ended() from None
        return time.monotonic(), times.user + times.system


@contextmanager
def running_vllm(interpreter: Path, settings: VllmSettings) -> Iterator[VllmProcess]:
    """Ends it afterwards, whatever happens. Raises VllmError, which names the log that is left then."""
    descriptor, name = tempfile.mkstemp(prefix="pdserve-bench-vllm-", suffix=".log")
    log = Path(name)
    try:
        with (
            os.fdopen(descriptor, "wb") as log_file,
            running(lambda: _start(interpreter, settings, log_file), _end) as process,
        ):
            yield VllmProcess(process)
    except VllmError as error:
        raise VllmError(f"vLLM in {interpreter}: {error}{_last_words(log)}") from error
    except BaseException:
        log.unlink()
        raise
    log.unlink()


def _start(interpreter: Path, settings: VllmSettings, log: IO[bytes]) -> subprocess.Popen[str]:
    """In a session of its own: Ctrl-C is ours to handle, and all that it starts can be ended with it."""
    try:
        return subprocess.Popen(
            [str(interpreter), str(_SCRIPT), settings.argument()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=settings.environment(),
            start_new_session=True,
        )
    except OSError as error:
        raise VllmError(f"it cannot be run: {error.strerror}") from error


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it started, which is in its group."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # what was still to be written to it
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        log.unlink()
        return ""
    return f": {lines[-1][:_MAX_WORDS]} (its log: {log})"
