"""Gives back what an attempt held on decode workers, in the background and with bounded tries.

What cannot be told is told by other means: a worker that is gone holds nothing, and one that lost this
router's stream, or hears nothing until a lease ends, lets go by itself.
"""

from __future__ import annotations

import asyncio
import logging

from observability.logs import fields
from pdserve.v1.errors import PdserveError
from router.attempt import Hold
from router.loss import back_off_s

logger = logging.getLogger(__name__)

MAX_TRIES = 5


class Releaser:
    def __init__(self) -> None:
        self.num_pending = 0

    def release(self, hold: Hold) -> None:
        """At once for this router's books; the worker hears of it a little later."""
        hold.worker.holdings.forget(hold.key)
        if hold.inbox.decode_let_go:
            return
        self.num_pending += 1
        hold.worker.run(self._tell(hold), "release")

    async def _tell(self, hold: Hold) -> None:
        try:
            await asyncio.wait({hold.reserving})
            for tries in range(1, MAX_TRIES + 1):
                if hold.worker.is_gone:
                    return
                try:
                    await hold.worker.release(hold.key)
                    return
                except PdserveError as error:
                    ids = fields(
                        transfer_id=hold.key.transfer_id, epoch=hold.key.epoch, worker=hold.worker.info.id
                    )
                    told = "release failed (%d of %d): %s"
                    logger.warning(told, tries, MAX_TRIES, error.message, extra=ids)
                    await asyncio.sleep(back_off_s(tries, base_s=0.05))
        finally:
            self.num_pending -= 1
