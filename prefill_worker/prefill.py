"""One prompt on its way through a prefill worker."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass

from engine.request import NewToken, PrefillReport, SequenceOutput, SequenceRequest
from engine.sampling import FinishReason
from kv_transfer.transfer import Transfer, TransferReport
from pdserve.v1.errors import Internal, PdserveError
from worker.statuses import failure


@dataclass(frozen=True, slots=True)
class FirstToken:
    token: NewToken
    finish_reason: FinishReason | None  # None: decoding goes on elsewhere
    report: PrefillReport | None


class Prefill:
    """The engine's thread drives the transfer (`advance`); the asyncio loop waits for what came of it.

    `transfer`, `request` and `accepted_at_s` never change. The two futures belong to the asyncio loop.
    """

    def __init__(self, request: SequenceRequest, transfer: Transfer, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.transfer = transfer
        # Monotonic. The engine hears of it behind the step in progress.
        self.accepted_at_s = time.monotonic()
        self._loop = loop
        self.first: asyncio.Future[FirstToken] = loop.create_future()
        self.report: asyncio.Future[TransferReport] = loop.create_future()
        for future in (self.first, self.report):
            future.add_done_callback(_observe)

    @property
    def sequence_id(self) -> str:
        return self.request.sequence_id

    def advance(self, output: SequenceOutput, block_table: tuple[int, ...], block_size: int) -> None:
        """On the engine's thread, after each step: what is final is offered, and the end is sealed. The first
        token is on its way before the transfer hears of it.
        """
        if output.error is not None:
            self.transfer.abort(failure(output))
            return
        if not output.new_tokens:
            self.transfer.offer(block_table, output.num_computed_tokens // block_size)
            return
        first = FirstToken(output.new_tokens[0], output.finish_reason, output.prefill)
        self._loop.call_soon_threadsafe(self._set_first, first)
        if first.finish_reason is None:
            self.transfer.commit(block_table, output.num_computed_tokens, first.token)
        else:
            self.transfer.not_needed()

    def _set_first(self, first: FirstToken) -> None:
        if not self.first.done():
            self.first.set_result(first)

    def set_outcome(self, outcome: Future[TransferReport | None]) -> None:
        """The transfer is over, well or not."""
        error = outcome.exception()
        if error is not None:
            self.fail(error if isinstance(error, PdserveError) else Internal(str(error)))
            return
        report = outcome.result()
        if report is not None and not self.report.done():
            self.report.set_result(report)

    def fail(self, error: PdserveError) -> None:
        for future in (self.first, self.report):
            if not future.done():
                future.set_exception(error)


def _observe(future: asyncio.Future[FirstToken] | asyncio.Future[TransferReport]) -> None:
    """The caller may be gone by the time it fails: then nobody asks for the error, and nobody has to."""
    if not future.cancelled():
        future.exception()
