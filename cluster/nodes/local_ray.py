"""A Ray of our own on this machine: loopback only, a token to come in, quiet, and ended by us alone."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ValidationError

from cluster.errors import PartError
from cluster.nodes.processes import ProcessId

_TOKEN_FILE = "token"
# Ray's sockets lie up to 75 characters below its folder, and a Unix socket's path has at most 107.
_LONGEST_FOLDER = 30


# In the environment of this process before it imports Ray: Ray's advice on every worker that ends is not for
# the user's terminal. What we have to say of it is in the worker's state.
QUIET = {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


class RayHead(BaseModel):
    """A Ray that runs: where, and the processes that make it up."""

    address: str
    processes: tuple[ProcessId, ...]


def make_folder() -> Path:
    """For Ray's sockets, logs and token; readable by this user only."""
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="pds-", dir=base if len(base) < _LONGEST_FOLDER - 12 else "/tmp"))
    token = folder / _TOKEN_FILE
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    return folder


def ray_environment(folder: Path) -> dict[str, str]:
    """What every process of our Ray, and whoever connects to it, has in its environment."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / _TOKEN_FILE),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Otherwise Ray reads 127.0.0.1 as "this machine's address on the network".
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # No idle Python process for each logical CPU.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        # Where Ray's head process dies, its others would end a minute later; ours serve without it.
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(30 * 86400),
        # Ray gives its workers a low priority by default: right for batches, wrong for serving.
        "RAY_worker_niceness": "0",
        # Pools are sized by the configuration; Ray shall not kill one because the machine is full.
        "RAY_memory_monitor_refresh_ms": "0",
    }


def start_local_ray(
    folder: Path, num_cpus: int, timeout_s: float, on_session: Callable[[ProcessId], None]
) -> RayHead:
    """Raises PartError. `on_session` is told the session to end, before there is anything else in it."""
    command = [sys.executable, "-m", "cluster.nodes.ray_head", str(folder), str(num_cpus)]
    with open(folder / "start.log", "wb") as log:
        starter = subprocess.Popen(
            command,
            env={**os.environ, **ray_environment(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    on_session(ProcessId.of(starter.pid, "ray_head"))
    try:
        answer, _ = starter.communicate(timeout=timeout_s)
        return RayHead.model_validate_json(answer)
    except subprocess.TimeoutExpired as error:
        starter.kill()
        raise PartError(f"Ray did not start within {timeout_s:.0f} s{_last_words(folder)}") from error
    except ValidationError as error:
        raise PartError(f"Ray did not start{_last_words(folder)}") from error


def _last_words(folder: Path) -> str:
    lines = (folder / "start.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
