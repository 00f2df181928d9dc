"""`python -m router --config FILE.json`: one router process.

Prints one JSON line, {"grpc": "host:port", "http": "host:port" or null}, when its ports are bound. Ends
when its stdin closes (whoever started it is gone) or on SIGTERM or SIGINT, after a short time for requests
in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
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


async def serve(config: RouterConfig) -> None:
    """Until told to stop. Raises what a background task died of."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    _stop_at_end_of_stdin(loop, stop)
    async with RouterServer(Router(config)) as server:
        _say({"grpc": server.address, "http": server.http_address})
        stopping = asyncio.ensure_future(stop.wait())
        failing = asyncio.ensure_future(server.router.tasks.wait_failed())
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        failing.cancel()
        await server.drain(config.drain_s)


def _stop_at_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    def wait() -> None:
        # Raw reads: a daemon thread that held sys.stdin's lock would disturb the interpreter's end.
        while os.read(0, 4096):
            pass
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def _say(line: dict[str, str | None]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m router")
    parser.add_argument("--config", type=Path, required=True, help="a RouterConfig as JSON")
    arguments = parser.parse_args()
    try:
        config = read_config(arguments.config)
        log_by(logging.StreamHandler(), config.observability)
        asyncio.run(serve(config))
    except (ValidationError, ModelFolderError, TrustError, CannotBind, OSError) as error:
        logger.error("cannot serve: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
