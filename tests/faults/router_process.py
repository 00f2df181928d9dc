"""A router in a process of its own, as `python -m router` is, that also says on SIGUSR1, in a line on stdout,
what it holds for requests though none is there: `router_process.py --config FILE`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from typing_extensions import Self

import router.__main__
from router.front.server import RouterServer
from router.integrity import IntegrityError


class AskedServer(RouterServer):
    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._say_what_is_held)
        return await super().__aenter__()

    def _say_what_is_held(self) -> None:
        try:
            self.router.check_idle()
            held = ""
        except IntegrityError as error:
            held = str(error)
        sys.stdout.write(json.dumps({"held": held}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    router.__main__.RouterServer = AskedServer  # type: ignore[misc]
    sys.argv[0] = "router"
    sys.exit(router.__main__.main())
