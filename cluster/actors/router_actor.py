"""The Ray actor that keeps one router running: a child process of its own, without Ray and without torch.

The child's stdin is a pipe that nobody writes to: when this actor dies, it closes, and the router ends.
Every start and end of the child is in logs/router.log, with the child's own lines between.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from cluster.actors.actor_process import die_with_parent, log_to
from cluster.control.policy import retry_delay_s
from observability.config import ObservabilityConfig
from observability.logs import message_of

log = logging.getLogger(__name__)

_STOP_GRACE_S = 10.0


class RouterStartError(Exception):
    """The router did not take its port; says what it said last."""


class RouterActor:
    """`config_file`: a router.config.RouterConfig as JSON, on this node."""

    def __init__(self, config_file: str, log_folder: str, observability: ObservabilityConfig) -> None:
        die_with_parent()
        log_to(log_folder, "router", observability)
        self._config_file = config_file
        self._log_path = Path(log_folder) / "router.log"
        self._log_file = open(self._log_path, "ab")  # noqa: SIM115 - the child's stderr, for all its lives
        self._child: asyncio.subprocess.Process | None = None
        self._supervising: asyncio.Task[None] | None = None
        self.num_restarts = 0

    async def start(self, timeout_s: float) -> str:
        """The address it serves. Raises RouterStartError."""
        address = await self._start_child(timeout_s)
        self._supervising = asyncio.ensure_future(self._supervise(timeout_s))
        return address

    async def stop(self) -> None:
        """Requests in flight have the router's own short time to end."""
        if self._supervising is not None:
            self._supervising.cancel()
        if self._child is None or self._child.returncode is not None:
            return
        self._child.terminate()
        try:
            await asyncio.wait_for(self._child.wait(), _STOP_GRACE_S)
        except asyncio.TimeoutError:
            self._child.kill()

    async def _supervise(self, timeout_s: float) -> None:
        """A router that ends by itself is started again: at once the first time, then ever later."""
        num_failures = 0
        while True:
            started = time.monotonic()
            code = await self._child.wait() if self._child is not None else None
            num_failures = 0 if time.monotonic() - started > 60 else num_failures + 1
            self.num_restarts += 1
            log.warning("router ended (code %s); restart %d", code, self.num_restarts)
            await asyncio.sleep(retry_delay_s(num_failures - 1) if num_failures else 0)
            try:
                await self._start_child(timeout_s)
            except RouterStartError as error:
                log.error("%s", error)

    async def _start_child(self, timeout_s: float) -> str:
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "router", "--config", self._config_file),
            env=_without_ray(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
        )
        said = self._child.stdout
        try:
            line = await asyncio.wait_for(said.readline(), timeout_s) if said is not None else b""
            address: str = json.loads(line)["grpc"]
        except (asyncio.TimeoutError, ValueError, KeyError) as error:
            if self._child.returncode is None:
                self._child.kill()
            await self._child.wait()
            raise RouterStartError(f"the router did not start: {self._last_line()}") from error
        log.info("router serves %s pid=%d", address, self._child.pid)
        return address

    def _last_line(self) -> str:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return message_of(lines[-1]) if lines else "it said nothing"


def _without_ray(environment: os._Environ[str]) -> dict[str, str]:
    """Ray's settings, its token's path among them, are none of the router's business."""
    return {name: value for name, value in environment.items() if not name.startswith("RAY_")}
