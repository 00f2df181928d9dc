"""What one router has out on one worker: sequences, prompts, and calls that wait for an answer.

Books only, but for the failures of those whose worker is lost: these are told at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial

from pdserve.v1 import worker_pb2
from pdserve.v1.errors import PdserveError
from router.fleet.worker_info import SequenceKey
from router.inbox import Inbox

ReserveAnswer = worker_pb2.ReserveResponse | PdserveError


class Holdings:
    """`on_change`: something was given back."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        # Prompt tokens sent for computing, by sequence; and blocks asked for without an answer yet.
        self.charges: dict[SequenceKey, int] = {}
        self.promises: dict[SequenceKey, int] = {}
        # Sequences whose failure the worker's loss is.
        self.prefilling: dict[SequenceKey, Inbox] = {}
        self.decoding: dict[SequenceKey, Inbox] = {}
        self._reserving: dict[SequenceKey, asyncio.Future[ReserveAnswer]] = {}
        self._on_change = on_change

    @property
    def outstanding_tokens(self) -> int:
        return sum(self.charges.values())

    @property
    def can_move(self) -> bool:
        """Whether anything here would be the better for going elsewhere."""
        return (
            any(not waiting.done() for waiting in self._reserving.values())
            or any(not (inbox.has_failed or inbox.decode_let_go) for inbox in self.decoding.values())
            or any(not (inbox.has_failed or inbox.heard_from_decode) for inbox in self.prefilling.values())
        )

    def by_name(self) -> Mapping[str, Collection[SequenceKey]]:
        return {
            "prompt tokens": self.charges,
            "blocks asked for": self.promises,
            "prefill": self.prefilling,
            "decoding": self.decoding,
        }

    def discharge(self, key: SequenceKey) -> None:
        if self.charges.pop(key, None) is not None:
            self._on_change()

    def forget(self, key: SequenceKey) -> None:
        """Tokens of this attempt that still come are for nobody."""
        if self.decoding.pop(key, None) is not None:
            self._on_change()

    async def answer_to(self, key: SequenceKey, call: asyncio.Task[ReserveAnswer]) -> ReserveAnswer:
        """What Reserve said, or as soon as the worker is lost, that. The call goes on, whoever waits."""
        waiting: asyncio.Future[ReserveAnswer] = asyncio.get_running_loop().create_future()
        self._reserving[key] = waiting
        call.add_done_callback(partial(_hand_on, waiting))
        try:
            return await waiting
        finally:
            del self._reserving[key]

    def lose_decoding(self, error: PdserveError) -> None:
        """One that only asks for room is not lost: it asks the next. One that has been given some is, though
        it may not have read the answer yet."""
        for key, inbox in tuple(self.decoding.items()):
            waiting = self._reserving.get(key)
            if waiting is None or _gives_room(waiting):
                inbox.fail_decode(error)
        self.answer_reserving(error)

    def answer_reserving(self, error: PdserveError) -> None:
        for waiting in self._reserving.values():
            if not waiting.done():
                waiting.set_result(error)

    def lose_prefills(self, error: PdserveError) -> None:
        for inbox in tuple(self.prefilling.values()):
            inbox.fail_prefill(error)


def _gives_room(waiting: asyncio.Future[ReserveAnswer]) -> bool:
    is_answered = waiting.done() and not waiting.cancelled() and waiting.exception() is None
    return is_answered and not isinstance(waiting.result(), PdserveError)


def _hand_on(waiting: asyncio.Future[ReserveAnswer], call: asyncio.Task[ReserveAnswer]) -> None:
    if waiting.done():
        return
    if call.cancelled():
        waiting.cancel()
    elif (bug := call.exception()) is not None:
        waiting.set_exception(bug)
    else:
        waiting.set_result(call.result())
