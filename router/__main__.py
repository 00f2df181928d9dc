"""`python -m router --config FILE.json`: one router process.

Prints one JSON line, {"grpc": "host:port", "http": "host:port" or null}, when its ports are bound. Ends
when its stdin closes (whoever started it is gone) or on SIGTERM or SIGINT, after a short time for requests
in flight. A line "drain SECONDS" on its stdin says that a successor listens, and gives them so long.

With `--beside` its ports may be another router's still, whose place it takes. With `--beat` it says each
second, by an empty line, that it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from observability.logs import log_by
from router.bind import CannotBind
from router.config import RouterConfig, read_config
from router.front.server import RouterServer
from router.router import Router
from router.text.model_folder import ModelFolderError
from trust.errors import TrustError

logger = logging.getLogger("router")

_BEAT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Stop:
    # For requests in flight.
    grace_s: float
    # Another router listens at the same ports.
    is_succeeded: bool = False


async def serve(config: RouterConfig, *, is_beside: bool = False, beats: bool = False) -> None:
    """Until told to stop. Raises what a background task died of."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[_Stop] = loop.create_future()

    def stop(how: _Stop) -> None:
        if not stopping.done():
            stopping.set_result(how)

    usual = _Stop(config.drain_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, usual)
    _listen_to_stdin(loop, stop, usual)
    async with RouterServer(Router(config), is_beside) as server:
        _say({"grpc": server.address, "http": server.http_address})
        if beats:
            os.set_blocking(1, False)  # nobody who does not read holds it up
            _beat(loop)
        failing = asyncio.ensure_future(server.router.tasks.wait_failed())
        either: set[asyncio.Future[_Stop] | asyncio.Future[None]] = {stopping, failing}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        failing.cancel()
        how = stopping.result() if stopping.done() else usual
        if how.is_succeeded:
            await server.step_aside()
        await server.drain(how.grace_s)


def _listen_to_stdin(loop: asyncio.AbstractEventLoop, stop: Callable[[_Stop], None], at_end: _Stop) -> None:
    def tell(how: _Stop) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop, how)

    def listen() -> None:
        # Raw reads: a daemon thread that held sys.stdin's lock would disturb the interpreter's end.
        while said := os.read(0, 4096):
            words = said.split()
            if len(words) == 2 and words[0] == b"drain":
                tell(_Stop(float(words[1]), is_succeeded=True))
        tell(at_end)

    threading.Thread(target=listen, name="stdin", daemon=True).start()


def _say(line: dict[str, str | None]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _beat(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(1, b"\n")
    loop.call_later(_BEAT_EVERY_S, _beat, loop)


def _allow_many_connections() -> None:
    """As many files as the machine gives us: the usual 1024 are fewer than the connections that we take."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m router")
    parser.add_argument("--config", type=Path, required=True, help="a RouterConfig as JSON")
    parser.add_argument("--beside", action="store_true", help="take the place of a router that runs")
    parser.add_argument("--beat", action="store_true", help="say each second that it runs")
    arguments = parser.parse_args()
    try:
        config = read_config(arguments.config)
        if arguments.beside:
            config = config.model_copy(update={"instance_id": f"{config.router_id}/{uuid.uuid4().hex[:8]}"})
        log_by(logging.StreamHandler(), config.observability)
        _allow_many_connections()
        asyncio.run(serve(config, is_beside=arguments.beside, beats=arguments.beat))
    except (ValidationError, ModelFolderError, TrustError, CannotBind, OSError) as error:
        logger.error("cannot serve: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
