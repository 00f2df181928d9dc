"""What every process of ours under Ray does first."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

from observability.config import ObservabilityConfig
from observability.logs import log_by

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The kernel kills this process when Ray's raylet, its parent, ends: even a stopped or stuck one.

    Ray's own check needs the process to run. Linux only; elsewhere Ray's check is all there is.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def live_past_nccl() -> None:
    """A communicator that fails is torn down by us (`kv_transfer/transport/nccl_pair.py`); torch's watchdog
    would end the process. Before torch is imported."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"


def log_to(folder: str | None, name: str, config: ObservabilityConfig) -> None:
    """One file for each place in a pool: a replacement writes on where its predecessor ended.

    On a node where that folder cannot be, stderr, which Ray keeps in its own logs.
    """
    if folder is not None:
        log_by(_file_handler(Path(folder), name), config)


def _file_handler(folder: Path, name: str) -> logging.Handler:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return logging.FileHandler(folder / f"{name}.log", encoding="utf-8")
    except OSError:
        return logging.StreamHandler()
