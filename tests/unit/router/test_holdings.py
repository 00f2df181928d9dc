"""What a router has out on a worker, and who is told when the worker is lost."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.v1 import worker_pb2
from pdserve.v1.errors import PdserveError, Unavailable
from router.fleet.holdings import Holdings, ReserveAnswer
from router.fleet.worker_info import SequenceKey
from router.inbox import Inbox
from router.tokens import Token

KEY = SequenceKey("t", 1)
LOST = Unavailable("lost")


def holdings() -> Holdings:
    return Holdings(lambda: None)


def test_a_sequence_moves_once() -> None:
    held = holdings()
    assert not held.can_move
    held.decoding[KEY] = Inbox(0)
    assert held.can_move
    held.lose_decoding(LOST)
    assert not held.can_move


def test_a_prompt_that_decodes_elsewhere_already_has_nothing_to_move() -> None:
    held, inbox = holdings(), Inbox(0)
    held.prefilling[KEY] = inbox
    assert held.can_move
    inbox.put_decode(Token(0, 5))
    assert not held.can_move
    held.lose_prefills(LOST)
    assert not inbox.has_failed


async def test_who_asks_for_room_hears_of_the_loss_and_loses_nothing() -> None:
    held, inbox = holdings(), Inbox(0)
    held.decoding[KEY] = inbox
    answer: asyncio.Future[ReserveAnswer] = asyncio.get_running_loop().create_future()

    async def reserve() -> ReserveAnswer:
        return await answer

    call = asyncio.ensure_future(reserve())
    asking = asyncio.ensure_future(held.answer_to(KEY, call))
    await asyncio.sleep(0)
    held.lose_decoding(LOST)
    assert await asking is LOST
    assert not inbox.has_failed
    # The call itself goes on, for whoever gives back what it takes.
    answer.set_result(worker_pb2.ReserveResponse())
    assert isinstance(await call, worker_pb2.ReserveResponse)


async def test_who_was_given_room_on_a_worker_that_is_lost_before_it_reads_so_loses_it() -> None:
    held, inbox = holdings(), Inbox(0)
    held.decoding[KEY] = inbox

    async def reserve() -> ReserveAnswer:
        return worker_pb2.ReserveResponse()

    call = asyncio.ensure_future(reserve())
    asking = asyncio.ensure_future(held.answer_to(KEY, call))
    await asyncio.sleep(0)
    # Behind what hands the answer on, and before whoever waits for it.
    call.add_done_callback(lambda _: held.lose_decoding(LOST))
    assert isinstance(await asking, worker_pb2.ReserveResponse)
    with pytest.raises(Unavailable, match="lost"):
        await asyncio.wait_for(inbox.take(), 5)


@pytest.mark.parametrize("said", [worker_pb2.ReserveResponse(), LOST])
async def test_an_answer_is_handed_on(said: worker_pb2.ReserveResponse | PdserveError) -> None:
    async def reserve() -> ReserveAnswer:
        return said

    assert await holdings().answer_to(KEY, asyncio.ensure_future(reserve())) is said


async def test_a_cancelled_call_cancels_who_waits() -> None:
    call: asyncio.Task[ReserveAnswer] = asyncio.ensure_future(asyncio.Event().wait())  # type: ignore[arg-type]
    asking = asyncio.ensure_future(holdings().answer_to(KEY, call))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
