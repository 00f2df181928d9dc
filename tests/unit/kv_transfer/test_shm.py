"""Shared memory between two real processes: who gets it, who is believed to write no more, and what stays."""

from __future__ import annotations

import collections
import errno
import gc
import logging
import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import EngineError
from kv_transfer.blocks import BufferBlocks, Cells
from kv_transfer.frame import Open
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.layout import KVLayout
from kv_transfer.shared_pool import PoolMemory, SharedPool, map_pool
from kv_transfer.socket_folder import SocketFolder, remove_left_overs
from kv_transfer.transport.base import ConnectionEvents
from kv_transfer.transport.grpc import GrpcPushServer, GrpcTransport
from kv_transfer.transport.several import SeveralEndpoints
from kv_transfer.transport.shm import HELLO, ShmConnection, ShmTransport
from kv_transfer.verify import Verify
from kv_transfer.ways import Way, WaySilent, WayUnusable
from pdserve.v1.errors import Unavailable
from tests.integrity import wait_until
from tests.trusted import TRUST
from tests.unit.kv_transfer.hand_over import INSTANCE, LAYOUT, WAIT_S, HandOver

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and pidfd are Linux's")
SIZE = LAYOUT.block_bytes
ROOT = Path(__file__).parents[3]
# Two blocks that the process in the middle of a copy writes.
BLOCKS = (5, 9)


class Silent:
    """Nobody listens to the answers."""

    def on_reply(self, raw: bytes) -> None: ...

    def on_lost(self, error: Exception) -> None: ...


@contextmanager
def shared() -> Iterator[HandOver]:
    with HandOver(ShmTransport(LAYOUT)) as both:
        yield both


class Sending:
    """A process that stands in the middle of the copy of its second block."""

    def __init__(self, both: HandOver) -> None:
        way = both.ways[0]
        assert way.nonce is not None
        self.target = both.reserve("a", BLOCKS, lease_s=60.0)
        arguments = (way.address, way.nonce.hex(), str(len(BLOCKS)))
        command = (sys.executable, "-m", "tests.unit.kv_transfer.shm_process", *arguments)
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.hear() == "half"
        assert both.target.array[BLOCKS[0]].all()  # no header said so yet, and there it is

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def is_half_there(self, both: HandOver) -> bool:
        halves = np.split(both.target.array[BLOCKS[1]], 2)
        return bool(halves[0].all() and not halves[1].any())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def both() -> Iterator[HandOver]:
    with shared() as made:
        yield made


@pytest.fixture
def sending(both: HandOver) -> Iterator[Sending]:
    made = Sending(both)
    yield made
    made.end()


# -- a sender in the middle of a copy ----------------------------------------------------------------


def test_a_stopped_sender_that_goes_on_after_the_abort_writes_into_nobody_elses_blocks(
    both: HandOver, sending: Sending
) -> None:
    sending.process.send_signal(signal.SIGSTOP)
    both.table.release(sending.target.key)
    assert both.events.of(sending.target.key) == ["quarantined"]
    # What is admitted meanwhile gets other blocks, and is served at once.
    second = both.reserve("b", (1, 2))
    both.send_all(second, (0, 1)).done.result(WAIT_S)
    assert sending.is_half_there(both)
    sending.process.send_signal(signal.SIGCONT)
    sending.tell("go")
    assert sending.hear() == "TRANSFER_ENDED"
    both.events.wait_for("freed", sending.target.key)
    assert not sending.is_half_there(both)  # the late half came, while the blocks were quarantined
    assert np.array_equal(both.target.array[[1, 2]], both.source.array[:2])
    both.table.release(second.key)


def test_a_sender_that_goes_on_without_an_abort_hands_over_everything(
    both: HandOver, sending: Sending
) -> None:
    sending.process.send_signal(signal.SIGSTOP)
    sending.process.send_signal(signal.SIGCONT)
    sending.tell("go")
    assert sending.hear() == "acked"
    both.events.wait_for("ready", sending.target.key)
    assert (both.target.array[list(BLOCKS)] == 0xAB).all()
    both.table.release(sending.target.key)


def test_blocks_of_a_killed_sender_are_free_as_soon_as_it_is_dead(both: HandOver, sending: Sending) -> None:
    began = time.monotonic()
    sending.process.kill()
    both.events.wait_for("freed", sending.target.key)
    assert time.monotonic() - began < 2.0
    assert both.events.of(sending.target.key) == ["failed", "quarantined", "freed"]
    assert both.events.errors[sending.target.key].reason == "KV_STREAM_BROKEN"
    assert sending.is_half_there(both)


def test_a_stopped_senders_blocks_stay_until_it_is_killed(both: HandOver, sending: Sending) -> None:
    sending.process.send_signal(signal.SIGSTOP)
    both.table.release(sending.target.key)
    assert not wait_until(lambda: "freed" in both.events.of(sending.target.key), 0.5)
    sending.process.kill()
    both.events.wait_for("freed", sending.target.key)


def test_a_stream_that_ends_without_a_farewell_proves_nothing(
    both: HandOver, sending: Sending, caplog: pytest.LogCaptureFixture
) -> None:
    sending.tell("vanish")
    both.events.wait_for("quarantined", sending.target.key)
    assert not wait_until(lambda: "freed" in both.events.of(sending.target.key), 1.5)
    assert f"pid={sending.process.pid} may still write" in caplog.text
    sending.process.kill()
    both.events.wait_for("freed", sending.target.key)


def test_a_sender_is_dead_even_where_a_child_of_it_holds_its_socket(both: HandOver, sending: Sending) -> None:
    sending.tell("lend")
    child = int(sending.hear())
    try:
        sending.process.kill()
        both.events.wait_for("freed", sending.target.key)
        os.kill(child, 0)  # which lives, and keeps the stream from ending by itself
    finally:
        os.kill(child, signal.SIGKILL)
    both.table.release(sending.target.key)


def test_a_worker_that_stops_does_not_wait_for_a_stopped_sender(caplog: pytest.LogCaptureFixture) -> None:
    made = HandOver(ShmTransport(LAYOUT))
    sending = Sending(made)
    try:
        sending.process.send_signal(signal.SIGSTOP)
        made.table.release(sending.target.key)
        began = time.monotonic()
        made.stop_listening()
        assert time.monotonic() - began < 5.0
        assert made.events.of(sending.target.key) == ["quarantined"]
    finally:
        sending.end()
    made.events.wait_for("freed", sending.target.key)
    made.close()


def test_a_sender_that_closes_gives_everything_back(both: HandOver) -> None:
    target = both.reserve("a", (0, 1))
    transfer = both.sender.open(target)
    transfer.offer((0,), 1)
    assert wait_until(lambda: both.table.bytes_received == SIZE)
    both.sender.close()  # in this very process, which lives on
    both.events.wait_for("freed", target.key)


def test_a_worker_that_stops_has_its_blocks_back_from_senders_that_live(both: HandOver) -> None:
    target = both.reserve("a", (0, 1))
    transfer = both.sender.open(target)
    transfer.offer((0,), 1)
    assert wait_until(lambda: both.table.bytes_received == SIZE)
    began = time.monotonic()
    both.stop_listening()
    assert time.monotonic() - began < 2.0
    assert both.events.of(target.key)[-1] == "freed"
    with pytest.raises(Unavailable):
        transfer.done.result(WAIT_S)


def test_garbage_ends_the_stream_and_its_sender_says_farewell(both: HandOver) -> None:
    lost = threading.Event()

    class Heard(Silent):
        def on_lost(self, error: Exception) -> None:
            lost.set()

    target = both.reserve("a", (0, 1))
    connection = ShmTransport(LAYOUT).connect(both.ways[0], Heard())
    connection.send(Open(target.key, INSTANCE, "shm", LAYOUT, 2, 0, Verify.OFF, is_remote_writer=True))
    connection._frames.send(b"\x04\x00\x00\x00junk")
    both.events.wait_for("quarantined", target.key)
    assert lost.wait(WAIT_S)
    connection.close()
    both.events.wait_for("freed", target.key)
    assert both.events.errors[target.key].reason == "KV_STREAM_BROKEN"


# -- who gets the memory -------------------------------------------------------------------------------


def test_the_socket_is_its_users_alone_and_gone_after_the_stop() -> None:
    with shared() as both:
        path = Path(both.address)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.parent.stat().st_uid == os.geteuid()
    assert not path.parent.exists()


def test_another_nonce_is_another_pool(both: HandOver) -> None:
    way = replace(both.ways[0], nonce=b"x" * 16)
    with pytest.raises(WayUnusable, match="another nonce"):
        ShmTransport(LAYOUT).connect(way, Silent())


def test_a_pool_of_another_layout_is_not_mapped(both: HandOver) -> None:
    other = KVLayout(3, 2, 8, 4, "float32", "tiny")
    with pytest.raises(WayUnusable, match="size"):
        ShmTransport(other).connect(both.ways[0], Silent())


def test_nobody_gets_the_memory_of_a_worker_of_another_user(
    both: HandOver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = os.geteuid()
    # The server's thread asks in the name of another user; the client's is asked by this one.
    monkeypatch.setattr(
        "kv_transfer.peer_process.os.geteuid",
        lambda: own + (threading.current_thread().name == "kv-shm"),
    )
    with pytest.raises(WayUnusable, match="no memory"):
        ShmTransport(LAYOUT).connect(both.ways[0], Silent())
    assert wait_until(lambda: f"runs as user {own}" in caplog.text)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("is_open", [False, True])
def test_a_process_of_another_user_is_kept_out(both: HandOver, is_open: bool) -> None:
    """By the folder; and, were that open to all, by the kernel's word on who connects."""
    path = Path(both.address)
    if is_open:
        path.chmod(0o666)
        path.parent.chmod(0o755)
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
        "s.settimeout(10); s.connect(sys.argv[1]); print(socket.recv_fds(s, 4, 1)[:2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "(b'', [])" if is_open else "Permission denied" in done.stderr


@pytest.mark.parametrize("what", ["nowhere", "dead", "silent", "hello without memory", "no nonce"])
def test_a_way_that_cannot_be_used_says_so(tmp_path: Path, what: str) -> None:
    way = Way("shm", str(tmp_path / "s"), None if what == "no nonce" else b"n")
    with socket.socket(socket.AF_UNIX) as listener:
        if what in ("silent", "hello without memory"):
            listener.bind(way.address)
            listener.listen()
        elif what == "dead":
            listener.bind(way.address)
        if what == "hello without memory":
            threading.Thread(target=lambda: listener.accept()[0].sendall(HELLO.pack(3))).start()
        expected = WaySilent if what == "silent" else WayUnusable
        with pytest.raises(expected):
            ShmTransport(LAYOUT, connect_timeout_s=0.3).connect(way, Silent())


# -- what goes wrong while it is handed out ------------------------------------------------------------


def test_a_worker_without_a_descriptor_left_takes_the_next_process_all_the_same(
    both: HandOver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept = socket.socket.accept
    failed: list[int] = []

    def fail_twice(listener: socket.socket) -> tuple[socket.socket, object]:
        if len(failed) < 2:
            failed.append(errno.EMFILE)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_twice)
    target = both.reserve("a", (0, 1))
    both.send_all(target, (0, 1)).done.result(WAIT_S)
    assert len(failed) == 2
    assert caplog.text.count("no KV connection can be taken by shm for now") == 1
    both.table.release(target.key)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_process_that_left_before_it_got_the_memory_leaves_no_descriptor_behind(
    both: HandOver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise BrokenPipeError("it left")

    before = num_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(socket, "send_fds", refuse)
        for _ in range(5):
            with pytest.raises(WayUnusable, match="no memory"):
                ShmTransport(LAYOUT).connect(both.ways[0], Silent())
    assert caplog.text.count("got none: it left") == 5
    assert wait_until(lambda: num_descriptors() <= before)


def test_a_process_that_cannot_use_the_memory_leaves_its_place_to_others(both: HandOver) -> None:
    before = num_descriptors()
    way = replace(both.ways[0], nonce=b"x" * 16)
    for _ in range(3):
        with pytest.raises(WayUnusable, match="another nonce"):
            ShmTransport(LAYOUT).connect(way, Silent())
    # Although this very process, which might write, lives on.
    assert wait_until(lambda: num_descriptors() <= before)
    assert not any(thread.name == f"kv-from-{os.getpid()}" for thread in threading.enumerate())


# -- what is offered and what is taken -----------------------------------------------------------------


def test_where_the_memory_will_not_open_kv_goes_by_the_next_way(
    both: HandOver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = GrpcPushServer(both.receiver, TRUST, "127.0.0.1", 0, SIZE)
    server.start()
    both.sender._transports["grpc"] = GrpcTransport(TRUST, SIZE)
    lost = Way("shm", "/nowhere/pool", b"n")
    target = replace(both.reserve("a", (0, 1)), ways=(lost, *server.ways))
    assert both.send_all(target, (0, 1)).done.result(WAIT_S) is not None
    assert "goes by grpc (not by shm: /nowhere/pool: [Errno 2] No such file or directory)" in caplog.text
    # Once for the pair, not once for each hand-over.
    other = replace(both.reserve("b", (2, 3)), ways=target.ways)
    both.send_all(other, (0, 1)).done.result(WAIT_S)
    assert caplog.text.count("goes by grpc") == 1
    both.sender.close()
    server.stop()
    both.table.release(target.key)
    both.table.release(other.key)


def test_where_nobody_answers_kv_goes_by_the_next_way_and_the_silent_one_is_left_alone(
    both: HandOver, tmp_path: Path
) -> None:
    tried: list[Way] = []

    class Counted(ShmTransport):
        def connect(self, way: Way, events: ConnectionEvents) -> ShmConnection:
            tried.append(way)
            return super().connect(way, events)

    server = GrpcPushServer(both.receiver, TRUST, "127.0.0.1", 0, SIZE)
    server.start()
    both.sender._transports.update(
        shm=Counted(LAYOUT, connect_timeout_s=0.3), grpc=GrpcTransport(TRUST, SIZE)
    )
    silent = Way("shm", str(tmp_path / "s"), b"n")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(silent.address)
        listener.listen()
        for name, block in (("a", 0), ("b", 1), ("c", 2)):
            target = replace(both.reserve(name, (block,)), ways=(silent, *server.ways))
            both.send_all(target, (block,)).done.result(WAIT_S)
            both.table.release(target.key)
    assert len(tried) == 1
    assert both.sender.counters.copy()["grpc"].num_transfers == 3
    both.sender.close()
    server.stop()


def test_a_worker_without_memfd_has_a_pool_of_its_own_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("not in this sandbox")

    monkeypatch.setattr(os, "memfd_create", refuse)
    memory = PoolMemory()
    assert memory(4096, torch.device("cpu")).shape == (4096,)
    assert memory.shared is None
    assert "not in this sandbox" in memory.why_not


def test_a_pool_that_no_machine_has_room_for_is_refused_as_ever() -> None:
    with pytest.raises(EngineError, match="no room"):
        PoolMemory()(1 << 50, torch.device("cpu"))


def test_several_ends_are_offered_in_order_and_stopped_whatever_one_does(both: HandOver) -> None:
    stopped: list[str] = []

    class End:
        def __init__(self, name: str) -> None:
            self.name = name
            self.ways = (Way(name, name),)

        def start(self) -> None: ...

        def stop(self) -> None:
            stopped.append(self.name)
            raise RuntimeError(self.name)

    several = SeveralEndpoints([End("a"), End("b")])
    assert [way.transport for way in several.ways] == ["a", "b"]
    several.start()
    with pytest.raises(RuntimeError):
        several.stop()
    assert sorted(stopped) == ["a", "b"]


# -- memory and what is left over ----------------------------------------------------------------------


def test_a_pools_pages_are_taken_when_they_are_written_and_only_once() -> None:
    num_blocks = 64 * 1024 * 1024 // SIZE
    pool = SharedPool(num_blocks * SIZE)
    assert pool.nonce is not None
    mapped = map_pool(pool.descriptor, num_blocks, LAYOUT, pool.nonce).blocks

    def taken() -> int:
        return os.fstat(pool.descriptor).st_blocks * 512

    assert taken() <= 2 * mmap.PAGESIZE
    ours = pool.tensor.view(num_blocks, SIZE)
    mapped.array[: num_blocks // 4] = 7
    assert (ours[: num_blocks // 4] == 7).all()
    ours[: num_blocks // 4] = 8
    assert (mapped.array[num_blocks // 4 - 1] == 8).all()
    assert taken() <= num_blocks * SIZE // 4 + 2 * mmap.PAGESIZE
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(pool.descriptor, 4096)


@contextmanager
def no_collection() -> Iterator[None]:
    """Of garbage in circles, which in a process that has long run may not come for hours."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")


@pytest.mark.parametrize("notices", ["while it waits", "while it sends"])
def test_a_sender_lets_the_memory_of_a_lost_worker_go_at_once(
    both: HandOver, monkeypatch: pytest.MonkeyPatch, notices: str
) -> None:
    send, before = FrameSocket.send, num_mapped()
    broken: list[bytes] = []

    def breaks(frames: FrameSocket, message: bytes) -> None:
        if threading.current_thread().name.startswith("kv-to") and not broken:
            broken.append(message)
            raise BrokenPipeError("it is gone")
        send(frames, message)

    with no_collection():
        both.send_all(target := both.reserve("a", (0, 1)), (0, 1)).done.result(WAIT_S)
        both.table.release(target.key)
        assert num_mapped() == before + 1
        if notices == "while it waits":
            both.stop_listening()
        else:
            monkeypatch.setattr(FrameSocket, "send", breaks)
            with pytest.raises(Unavailable, match="it is gone"):
                both.send_all(again := both.reserve("b", (0, 1)), (0, 1)).done.result(WAIT_S)
            both.table.release(again.key)
        assert wait_until(lambda: num_mapped() == before)


def test_what_killed_workers_left_is_removed_and_what_lives_is_not() -> None:
    script = (
        "from kv_transfer.socket_folder import SocketFolder as F; f = F(); print(f.path, flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    path = Path(child.stdout.readline().strip())
    ours = SocketFolder()
    remove_left_overs()
    assert path.exists()
    child.kill()
    child.communicate()
    assert path.exists()
    with shared():  # the next worker that starts
        assert not path.exists()
        assert ours.path.exists()
    ours.remove()
    assert not ours.path.exists()


# -- pieces --------------------------------------------------------------------------------------------


def test_the_pages_of_a_block_are_taken_as_a_whole_and_of_no_other() -> None:
    layout = KVLayout(4, 2, 64, 16, "float32", "large")  # 64 KiB a block
    pool = SharedPool(32 * layout.block_bytes)
    mapped = map_pool(pool.descriptor, 32, layout, pool.nonce)
    source = BufferBlocks(3, layout)
    source.array[:] = 5

    def taken() -> int:
        return os.fstat(pool.descriptor).st_blocks * 512 // layout.block_bytes

    mapped.write((9, 30, 8), Cells(source, (0, 1, 2), range(1)))
    assert taken() == 3
    ours = pool.tensor.view(32, 4, -1)
    assert (ours[[8, 9, 30], 0] == 5).all()
    assert not ours[[8, 9, 30], 1:].any()
    mapped.write((9, 30, 8), Cells(source, (0, 1, 2), range(1, 4)))
    assert (ours[[8, 9, 30]] == 5).all()


@pytest.mark.parametrize(
    ("source_ids", "target_ids"),
    [
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((3, 2, 1, 0), (0, 1, 2, 3)),
        ((7, 3, 4, 5, 0), (5, 4, 3, 2, 9)),
        ((6,), (0,)),
        ((2, 0), (1, 0)),
        ((0, 2, 4, 9, 8), (9, 6, 3, 0, 1)),
    ],
)
@pytest.mark.parametrize("layers", [range(2), range(1, 2), range(1)])
@pytest.mark.parametrize("num_tail_tokens", [None, 3])
def test_cells_are_copied_where_they_belong(
    source_ids: tuple[int, ...], target_ids: tuple[int, ...], layers: range, num_tail_tokens: int | None
) -> None:
    source, straight, joined = (BufferBlocks(10, LAYOUT) for _ in range(3))
    source.array[:] = np.random.default_rng(2).integers(1, 256, source.array.shape, np.uint8)
    cells = Cells(source, source_ids, layers, num_tail_tokens)
    straight.write_cells(target_ids, cells)
    joined.write(target_ids, layers, memoryview(b"".join(cells.pieces)))
    assert np.array_equal(straight.array, joined.array)
    assert straight.array.any()


def test_messages_come_whole_however_they_were_cut() -> None:
    ours, theirs = socket.socketpair()
    frames = FrameSocket(ours, 1.0)
    sent = [b"", b"x", b"y" * 100_000, b"", b"z"]
    raw = b"".join(len(message).to_bytes(4, "little") + message for message in sent)

    def trickle() -> None:
        for start in range(0, len(raw), 999):
            theirs.sendall(raw[start : start + 999])
        theirs.close()

    thread = threading.Thread(target=trickle)
    thread.start()
    assert [frames.receive() for _ in sent] == sent
    assert frames.receive() is None
    thread.join()
    frames.close()


def test_a_peer_that_reads_nothing_ends_a_send_in_time() -> None:
    ours, theirs = socket.socketpair()
    frames = FrameSocket(ours, 0.2)
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        collections.deque((frames.send(b"x" * 100_000) for _ in range(1000)), maxlen=0)
    assert time.monotonic() - began < 5.0
    frames.close()
    theirs.close()
