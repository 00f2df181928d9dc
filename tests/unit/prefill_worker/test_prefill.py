"""What a prompt's transfer is asked for after each step of the engine."""

from __future__ import annotations

import asyncio

import pytest

from engine.request import NewToken, SequenceOutput, SequenceRequest
from engine.sampling import FinishReason, SamplingParams, StopConditions
from kv_transfer.frame import TransferKey
from kv_transfer.transfer import PushTarget, Transfer
from pdserve.v1.errors import Internal, InvalidArgument, PdserveError
from prefill_worker.prefill import Prefill

B = 16
TABLE = (5, 3, 9)
TOKEN = NewToken(0, 42, None)


class Asked:
    """Keeps what it is asked for, and sends nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def offer(self, transfer: Transfer, block_ids: tuple[int, ...], num_ready_blocks: int) -> None:
        self.calls.append(("offer", block_ids, num_ready_blocks))

    def offer_layers(
        self, transfer: Transfer, block_ids: tuple[int, ...], num_tokens: int, num_layers: int
    ) -> None:
        self.calls.append(("offer_layers", block_ids, num_tokens, num_layers))

    def commit(
        self, transfer: Transfer, block_ids: tuple[int, ...], num_tokens: int, first: NewToken
    ) -> None:
        self.calls.append(("commit", block_ids, num_tokens, first))

    def withdraw(self, transfer: Transfer, error: PdserveError | None) -> None:
        self.calls.append(("withdraw", error))


def made(asked: Asked) -> Prefill:
    target = PushTarget(TransferKey("a", 0), "d", (), 0, len(TABLE), 30.0)
    request = SequenceRequest("a/0", tuple(range(40)), (), SamplingParams(), StopConditions(8))
    return Prefill(request, Transfer(target, 2, asked), asyncio.get_running_loop())


def output(
    num_computed: int, *tokens: NewToken, finish: FinishReason | None = None, is_last: bool = False
) -> SequenceOutput:
    return SequenceOutput("a/0", num_computed, tokens, finish, is_last)


async def test_only_blocks_that_a_chunk_has_filled_are_offered_and_the_first_token_commits_them_all() -> None:
    asked = Asked()
    prefill = made(asked)
    prefill.advance(output(B + 4), TABLE, B)
    assert not prefill.first.done()
    prefill.advance(output(40, TOKEN, is_last=True), TABLE, B)
    assert asked.calls == [("offer", TABLE, 1), ("commit", TABLE, 40, TOKEN)]
    assert (await asyncio.wait_for(prefill.first, 5.0)).token == TOKEN


@pytest.mark.parametrize("finish", list(FinishReason))
async def test_a_first_token_that_ends_the_answer_commits_nothing(finish: FinishReason) -> None:
    asked = Asked()
    prefill = made(asked)
    prefill.advance(output(40, TOKEN, finish=finish, is_last=True), TABLE, B)
    assert asked.calls == [("withdraw", None)]
    assert (await asyncio.wait_for(prefill.first, 5.0)).finish_reason is finish


@pytest.mark.parametrize(("is_refused", "error"), [(False, Internal), (True, InvalidArgument)])
async def test_a_sequence_that_broke_takes_its_transfer_with_it(
    is_refused: bool, error: type[PdserveError]
) -> None:
    asked = Asked()
    prefill = made(asked)
    broken = output(B, is_last=True)._replace(error="it broke", is_refused=is_refused)
    prefill.advance(broken, TABLE, B)
    ((what, told),) = asked.calls
    assert what == "withdraw"
    assert isinstance(told, error)
    assert "it broke" in told.message
