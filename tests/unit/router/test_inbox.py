from __future__ import annotations

import asyncio

import pytest

from pdserve.v1.errors import Internal, Unavailable
from router.inbox import Inbox
from router.tokens import PrefillReport, Token

REPORT = PrefillReport(cached_tokens=4, queue_ms=1.0, prefill_ms=2.0)


def positions(tokens: list[Token]) -> list[int]:
    return [token.position for token in tokens]


async def test_the_repeated_first_token_is_taken_once() -> None:
    inbox = Inbox(0)
    inbox.put_prefill(Token(0, 10, report=REPORT))
    inbox.put_decode(Token(0, 10))
    inbox.put_decode(Token(1, 11))
    assert positions(await inbox.take()) == [0, 1]
    inbox.put_decode(Token(1, 11))
    inbox.put_decode(Token(2, 12))
    assert positions(await inbox.take()) == [2]


async def test_a_token_that_comes_again_late_is_dropped_and_counts_as_nothing_unread() -> None:
    inbox = Inbox(0)
    for position in range(3):
        inbox.put_decode(Token(position, 10 + position))
    assert positions(await inbox.take()) == [0, 1, 2]
    inbox.put_prefill(Token(0, 10, report=REPORT))
    assert inbox.num_unread == 0
    inbox.put_decode(Token(3, 13))
    assert inbox.num_unread == 1
    assert positions(await inbox.take()) == [3]
    assert inbox.num_unread == 0


async def test_decode_tokens_that_overtake_wait_for_the_report() -> None:
    inbox = Inbox(5)
    inbox.await_report()
    inbox.put_decode(Token(6, 11))
    inbox.put_decode(Token(5, 10))
    taking = asyncio.ensure_future(inbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    inbox.put_prefill(Token(5, 10, report=REPORT))
    tokens = await taking
    assert positions(tokens) == [5, 6]
    assert tokens[0].report == REPORT


async def test_a_prefill_worker_that_dies_between_commit_and_answer_is_no_loss() -> None:
    inbox = Inbox(0)
    inbox.await_report()
    inbox.put_decode(Token(0, 10))
    inbox.fail_prefill(Unavailable("gone"))
    assert positions(await inbox.take()) == [0]


async def test_a_failure_is_told_behind_the_tokens_before_it() -> None:
    inbox = Inbox(0)
    inbox.put_decode(Token(0, 10))
    inbox.fail_decode(Unavailable("gone"))
    assert positions(await inbox.take()) == [0]
    with pytest.raises(Unavailable):
        await inbox.take()


async def test_a_prefill_failure_before_the_decode_worker_speaks_is_the_attempts() -> None:
    inbox = Inbox(0)
    inbox.put_prefill(Token(0, 10, report=REPORT))
    inbox.fail_prefill(Unavailable("transfer failed"))
    assert positions(await inbox.take()) == [0]
    with pytest.raises(Unavailable):
        await inbox.take()
    assert inbox.is_failed_by_prefill


async def test_workers_that_disagree_about_a_token_are_a_bug() -> None:
    inbox = Inbox(0)
    inbox.put_prefill(Token(0, 10, report=REPORT))
    await inbox.take()
    inbox.put_decode(Token(0, 11))
    with pytest.raises(Internal, match="disagree"):
        await inbox.take()
