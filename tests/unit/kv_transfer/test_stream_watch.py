"""Streams that keep their places, and those that do not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import grpc
import pytest

from kv_transfer.codec import encode
from kv_transfer.frame import Renew, TransferKey
from kv_transfer.transport.grpc import PUSH, GrpcPushServer
from kv_transfer.transport.stream_watch import StreamLimits, StreamWatch, WatchedStream
from pdserve.v1.errors import Unavailable
from tests.integrity import wait_until
from tests.trusted import TRUST
from tests.unit.kv_transfer.hand_over import WAIT_S, HandOver
from tests.unit.kv_transfer.test_reservation import Clock
from trust.channels import open_channel

LIMITS = StreamLimits(max_streams=3, first_s=5.0, idle_s=100.0, crowded_s=30.0, unread_s=10.0)


class Watched:
    """A watch whose clock stands still, and streams whose peers have said what they have to say."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.watch = StreamWatch(LIMITS, self.clock)
        self.ended: list[str] = []
        self._all = ExitStack()

    def stream(self, name: str, messages: list[bytes]) -> WatchedStream:
        watching = self.watch.watching(iter(messages), name, lambda: self.ended.append(name))
        return self._all.enter_context(watching)

    def after(self, seconds: float) -> list[str]:
        """Which are ended then, in all."""
        self.clock.now += seconds
        self.watch.look()
        return self.ended


def test_a_stream_that_begins_with_silence_is_ended() -> None:
    watched = Watched()
    watched.stream("silent", [])
    list(watched.stream("heard", [b"x"]))
    assert watched.after(4.9) == []
    assert watched.after(0.2) == ["silent"]


def test_each_message_gives_a_stream_its_time_again() -> None:
    watched = Watched()
    messages = iter(watched.stream("a", [b"x", b"y"]))
    next(messages)
    assert watched.after(99.0) == []
    next(messages)
    assert watched.after(99.0) == []
    assert watched.after(2.0) == ["a"]


def test_where_all_places_are_taken_the_most_silent_stream_leaves() -> None:
    watched = Watched()
    for name in "ab":
        list(watched.stream(name, [b"x"]))
        watched.clock.now += 1.0
    assert watched.after(40.0) == []  # there is room
    list(watched.stream("c", [b"x"]))
    assert watched.after(0.0) == ["a"]


def test_where_all_places_are_taken_by_streams_that_are_heard_of_none_leaves() -> None:
    watched = Watched()
    for name in "abc":
        list(watched.stream(name, [b"x"]))
    assert watched.after(29.0) == []


def test_a_stream_whose_answer_nobody_reads_is_ended() -> None:
    watched = Watched()
    stream = watched.stream("a", [b"x", b"y"])
    messages, answers = iter(stream), stream.pass_on(iter([b"1", b"2"]))
    next(messages)
    next(answers)
    assert watched.after(9.0) == []
    next(answers)  # the first has left
    assert watched.after(9.0) == []
    next(messages)
    assert watched.after(2.0) == ["a"]


def is_handed_over(both: HandOver, name: str) -> bool:
    target = both.reserve(name, (0, 1))
    try:
        both.send_all(target, (0, 1)).done.result(WAIT_S)
    except Unavailable:
        return False
    finally:
        both.table.release(target.key)
    return True


@pytest.mark.parametrize("first", [[], [encode(Renew(TransferKey("nobody's", 0), 1))]], ids=["none", "one"])
def test_streams_that_say_nothing_lock_no_prefill_worker_out(
    first: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    limits = StreamLimits(max_streams=2, first_s=0.2, crowded_s=0.3, tick_s=0.05)
    over = threading.Event()

    def say() -> Iterator[bytes]:
        yield from first
        over.wait(WAIT_S)

    with HandOver("grpc") as both, ExitStack() as opened:
        server = GrpcPushServer(both.receiver, TRUST, "127.0.0.1", 0, both.layout.block_bytes, limits)
        server.start()
        opened.callback(server.stop)
        opened.callback(over.set)
        channel = opened.enter_context(open_channel(server.address, TRUST))
        calls = [channel.stream_stream(PUSH, None, None)(say()) for _ in range(2)]
        both.ways = server.ways
        assert wait_until(lambda: "is ended" in caplog.text, WAIT_S)
        attempts = count()
        assert wait_until(lambda: is_handed_over(both, f"attempt-{next(attempts)}"), WAIT_S)
        both.sender.close()
        assert len(calls) == 2  # which were held until here


def test_streams_of_strangers_hold_no_place() -> None:
    limits = StreamLimits(max_streams=1, first_s=9 * WAIT_S, crowded_s=9 * WAIT_S)
    over = threading.Event()

    def say_nothing() -> Iterator[bytes]:
        over.wait(9 * WAIT_S)
        yield from ()

    with HandOver("grpc") as both, ExitStack() as opened:
        server = GrpcPushServer(both.receiver, TRUST, "127.0.0.1", 0, both.layout.block_bytes, limits)
        server.start()
        opened.callback(server.stop)
        opened.callback(over.set)
        channel = opened.enter_context(grpc.insecure_channel(server.address))
        strangers = [channel.stream_stream(PUSH, None, None)(say_nothing()) for _ in range(8)]
        refused = {stranger.code() for stranger in strangers}  # each has ended
        # The others came while the one place was taken by the answer to another.
        assert refused <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert grpc.StatusCode.UNAUTHENTICATED in refused
        both.ways = server.ways
        attempts = count()
        assert wait_until(lambda: is_handed_over(both, f"attempt-{next(attempts)}"), WAIT_S)
        both.sender.close()


def test_a_sender_whose_idle_stream_was_ended_makes_a_new_one() -> None:
    limits = StreamLimits(idle_s=0.3, tick_s=0.05)
    with HandOver("grpc") as both:
        server = GrpcPushServer(both.receiver, TRUST, "127.0.0.1", 0, both.layout.block_bytes, limits)
        server.start()
        both.ways = server.ways
        for name in ("a", "b"):
            target = both.reserve(name, (0, 1))
            both.send_all(target, (0, 1)).done.result(WAIT_S)
            assert wait_until(lambda: both.sender.routes() == {})
            both.table.release(target.key)
        both.sender.close()
        server.stop()
