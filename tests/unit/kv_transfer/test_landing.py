"""Payloads that come apart from their headers: where they may be written, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from kv_transfer.codec import decode, encode
from kv_transfer.frame import Ack, Blocks, Commit, Open, Refused, TransferKey
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transport.base import InboundStream, Landing
from kv_transfer.transport.memory import MemoryTransport
from kv_transfer.verify import Digest, Verify, checksum
from tests.unit.kv_transfer.hand_over import FIRST, INSTANCE, LAYOUT, HandOver

STREAM = InboundStream("test", "memory")


@pytest.fixture(params=list(Verify))
def both(request: pytest.FixtureRequest) -> Iterator[HandOver]:
    verify: Verify = request.param
    with HandOver(MemoryTransport(), config=SenderConfig(verify=verify), verify=verify) as made:
        yield made


def opened(both: HandOver, block_ids: tuple[int, ...]) -> TransferKey:
    verify = both.receiver._verify
    assert verify is not None
    target = both.reserve("a", block_ids)
    frame = Open(target.key, INSTANCE, "memory", LAYOUT, len(block_ids), 0, verify)
    assert isinstance(answer(both.receiver.accept(STREAM, encode(frame))), Ack)
    return target.key


def land(both: HandOver, key: TransferKey, seq: int) -> Landing:
    """Of frame `seq`, which ships block seq - 1 from the source's block of the same number."""
    pieces = both.source.read((seq - 1,), range(LAYOUT.num_layers))
    header = Blocks(key, seq, seq - 1, 1, 0, LAYOUT.num_layers, checksum(pieces))
    return both.receiver.land(STREAM, header)


def fill(both: HandOver, landing: Landing) -> None:
    (piece,) = landing.pieces([1])
    piece[:] = both.source.read((landing.header.first_block,), range(LAYOUT.num_layers))[0]


def answer(raw: bytes | None) -> object:
    return decode(raw or b"")[0]


def commit(both: HandOver, key: TransferKey, num_blocks: int, num_frames: int | None = None) -> object:
    """Behind so many frames; without a word, behind all."""
    digest, num_frames = Digest(), num_blocks if num_frames is None else num_frames
    for block_id in range(num_frames):
        digest.add(checksum(both.source.read((block_id,), range(LAYOUT.num_layers))))
    frame = Commit(key, num_frames + 1, num_blocks, digest.value(), FIRST, 0)
    return answer(both.receiver.accept(STREAM, encode(frame)))


@pytest.mark.parametrize("is_in_place", [True, False])
def test_landings_are_made_ahead_and_done_in_order(both: HandOver, is_in_place: bool) -> None:
    key = opened(both, (5, 3, 9))
    landings = [land(both, key, seq) for seq in (1, 2, 3)]
    for landing in reversed(landings):  # the bytes may come in any order
        if is_in_place:
            fill(both, landing)
    for landing in landings:
        if not is_in_place:
            landing.write(both.source.read((landing.header.first_block,), range(LAYOUT.num_layers))[0])
        assert answer(landing.done()) == Ack(key, landing.header.seq)
    assert isinstance(commit(both, key, 3), Ack)
    assert both.table.consume(key) is not None
    assert np.array_equal(both.target.array[[5, 3, 9]], both.source.array[:3])


@pytest.mark.parametrize("num_frames", [2, 1], ids=["in its place", "under the number of what is not done"])
def test_no_commit_passes_a_landing_that_is_not_done(both: HandOver, num_frames: int) -> None:
    key = opened(both, (5, 3))
    fill(both, first := land(both, key, 1))
    second = land(both, key, 2)
    first.done()
    assert isinstance(commit(both, key, 2, num_frames), Refused)
    assert both.events.of(key) == ["failed", "quarantined"]
    second.lost()
    assert both.events.of(key)[-1] == "freed"


def test_blocks_of_a_reservation_that_ended_wait_for_their_landings(both: HandOver) -> None:
    key = opened(both, (5, 3))
    landings = [land(both, key, seq) for seq in (1, 2)]
    both.table.release(key)
    assert both.events.of(key) == ["quarantined"]
    fill(both, landings[0])
    refused = answer(landings[0].done())
    assert isinstance(refused, Refused)
    assert refused.reason == "TRANSFER_ENDED"
    assert both.events.of(key) == ["quarantined"]
    landings[1].lost()
    assert both.events.of(key) == ["quarantined", "freed"]


def test_a_landing_that_cannot_be_checked_holds_no_block(
    both: HandOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose memory has run out."""
    key = opened(both, (5,))
    fill(both, landing := land(both, key, 1))

    def fails(*_: object) -> list[memoryview]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(both.target, "read", fails)
    is_checked = both.receiver._verify is not Verify.OFF
    with pytest.raises(RuntimeError) if is_checked else nullcontext():
        landing.done()
    both.receiver.disconnect(STREAM)
    assert both.events.of(key) == ["failed", "freed"]


@pytest.mark.parametrize("is_in_place", [True, False])
def test_what_arrives_damaged_fails_its_transfer_where_it_is_checked(
    both: HandOver, is_in_place: bool
) -> None:
    key = opened(both, (5,))
    landing = land(both, key, 1)
    payload = bytearray(both.source.read((0,), range(LAYOUT.num_layers))[0])
    payload[-1] ^= 1
    if is_in_place:
        landing.pieces([1])[0][:] = payload
    else:
        landing.write(memoryview(payload))
    is_checked = both.receiver._verify is not Verify.OFF
    assert isinstance(answer(landing.done()), Refused if is_checked else Ack)
    assert both.target.array[5].any() == (is_in_place or not is_checked)
    both.table.release(key)
    assert both.events.of(key) == (["failed", "freed"] if is_checked else ["freed"])


def test_a_payload_that_is_not_due_is_unwanted_and_ends_its_transfer(both: HandOver) -> None:
    key = opened(both, (5, 3))
    landing = land(both, key, 2)
    assert not landing.is_wanted
    assert isinstance(answer(landing.done()), Refused)
    assert both.events.of(key) == ["failed", "freed"]


def test_a_payload_of_a_stranger_does_no_harm(both: HandOver) -> None:
    key = opened(both, (5,))
    header = Blocks(key, 1, 0, 1, 0, LAYOUT.num_layers, 0)
    stranger = both.receiver.land(InboundStream("another", "memory"), header)
    assert not stranger.is_wanted
    assert isinstance(answer(stranger.done()), Refused)
    fill(both, landing := land(both, key, 1))
    assert isinstance(answer(landing.done()), Ack)
    again = land(both, key, 1)
    assert not again.is_wanted
    assert answer(again.done()) == Ack(key, 1)
    assert isinstance(commit(both, key, 1), Ack)
    assert both.table.consume(key) is not None
