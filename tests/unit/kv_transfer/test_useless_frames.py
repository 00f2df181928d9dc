"""A peer whose frames nobody can use costs neither memory nor a log without end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from kv_transfer.codec import FrameError, encode
from kv_transfer.frame import Abort, Blocks, Open, Renew, TransferKey
from kv_transfer.landing import MAX_REFUSED
from kv_transfer.transfer import PushTarget
from kv_transfer.transport.answers import MAX_UNREAD
from kv_transfer.transport.base import InboundStream
from kv_transfer.transport.grpc import PUSH, GrpcPushServer
from kv_transfer.transport.inbound_pair import InboundPair, PairTimeouts
from kv_transfer.transport.stream_watch import StreamLimits
from kv_transfer.verify import Verify
from tests.integrity import wait_until
from tests.trusted import TRUST
from tests.unit.kv_transfer.hand_over import INSTANCE, LAYOUT, WAIT_S, HandOver
from trust.channels import open_channel

LONG_ID = "x" * 4000
USELESS = encode(Renew(TransferKey(LONG_ID, 1), 1))


def opening(target: PushTarget) -> bytes:
    return encode(Open(target.key, INSTANCE, "grpc", LAYOUT, 1, 0, Verify.CHECKSUM))


@pytest.fixture
def both() -> Iterator[HandOver]:
    with HandOver("grpc") as made:
        yield made


def test_a_stream_of_which_everything_is_refused_ends(
    both: HandOver, caplog: pytest.LogCaptureFixture
) -> None:
    stream = InboundStream("a peer", "grpc")
    for _ in range(MAX_REFUSED):
        both.receiver.accept(stream, USELESS)
    with pytest.raises(FrameError, match="in a row"):
        both.receiver.accept(stream, USELESS)
    with pytest.raises(FrameError, match="in a row"):
        both.receiver.land(stream, Blocks(TransferKey("b", 1), 1, 0, 1, 0, LAYOUT.num_layers, 0))
    assert len(caplog.records) == 10
    for record in caplog.records:
        assert len(record.getMessage()) < 200
        assert len(record.__dict__["transfer_id"]) <= 65


def test_a_frame_that_is_taken_forgives_those_that_were_refused(both: HandOver) -> None:
    stream = InboundStream("memory", "grpc")
    for _ in range(5):
        both.receiver.accept(stream, USELESS)
    target = both.reserve("a", (0,))
    both.receiver.accept(stream, opening(target))
    assert stream.num_refused == 0
    both.receiver.disconnect(stream)
    both.table.release(target.key)


def test_aborts_of_what_is_not_there_are_no_lines_of_the_log(
    both: HandOver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stream = InboundStream("a peer", "grpc")
    for _ in range(3):
        assert both.receiver.accept(stream, encode(Abort(TransferKey(LONG_ID, 1), "because"))) is None
    assert not [record for record in caplog.records if record.name.startswith("kv_transfer")]


def test_a_pairs_answers_that_nobody_reads_cannot_pile_up(both: HandOver) -> None:
    stream = InboundStream("a peer", "collective")
    inbound = InboundPair(iter(()), stream, both.receiver, both.target, "127.0.0.1", PairTimeouts())
    for _ in range(MAX_UNREAD):
        inbound._say(b"answer")
    with pytest.raises(FrameError, match="not read"):
        inbound._say(b"answer")


def test_a_peer_that_reads_no_answers_loses_its_stream(
    both: HandOver, caplog: pytest.LogCaptureFixture
) -> None:
    limits = StreamLimits(unread_s=0.3, tick_s=0.05)
    server = GrpcPushServer(both.receiver, TRUST, "127.0.0.1", 0, both.layout.block_bytes, limits)
    server.start()
    over = threading.Event()
    target = both.reserve(LONG_ID, (0,))

    def flood() -> Iterator[bytes]:
        yield opening(target)
        while not over.is_set():
            yield encode(Renew(target.key, 0))

    with open_channel(server.address, TRUST) as channel:
        call = channel.stream_stream(PUSH, None, None)(flood())
        try:
            assert wait_until(lambda: "is ended: no answer was read" in caplog.text, WAIT_S)
        finally:
            over.set()
            call.cancel()  # type: ignore[no-untyped-call]  # untyped in grpc-stubs
            server.stop()
    both.table.release(target.key)
