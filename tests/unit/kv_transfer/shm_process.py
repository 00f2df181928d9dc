"""A prefill worker's end of one hand-over, in a process that may be stopped and killed in the middle of a
copy: `shm_process PATH NONCE NUM_BLOCKS`.

Every block is a frame. In the middle of the second it says "half" and waits for lines on stdin: "vanish" ends
its socket without a word, "lend" hands it to a child process, whose pid is then said, and "go" lets it copy
on. Then it says how the hand-over ended, and waits for stdin to close.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence

from kv_transfer.blocks import BufferBlocks, Cells, HostBlocks
from kv_transfer.frame import TransferKey
from kv_transfer.send_queue import SenderConfig
from kv_transfer.sender import Sender
from kv_transfer.transfer import PushTarget
from kv_transfer.transport.base import ConnectionEvents
from kv_transfer.transport.shm import ShmConnection, ShmTransport
from kv_transfer.ways import Way
from pdserve.v1.errors import PdserveError
from tests.unit.kv_transfer.hand_over import FIRST, INSTANCE, LAYOUT


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


class _Watched(ShmTransport):
    connection: ShmConnection | None = None

    def connect(self, way: Way, events: ConnectionEvents) -> ShmConnection:
        self.connection = super().connect(way, events)
        return self.connection


def main(path: str, nonce: str, num_blocks: int) -> None:
    may_go_on = threading.Event()
    write_cells, num_written = HostBlocks.write_cells, 0

    def in_two_halves(self: HostBlocks, block_ids: Sequence[int], cells: Cells) -> None:
        nonlocal num_written
        num_written += 1
        if num_written != 2:
            write_cells(self, block_ids, cells)
            return
        layers = cells.layers
        middle = (layers.start + layers.stop) // 2
        write_cells(self, block_ids, Cells(cells.store, cells.block_ids, range(layers.start, middle)))
        say("half")
        may_go_on.wait()
        write_cells(self, block_ids, Cells(cells.store, cells.block_ids, range(middle, layers.stop)))

    HostBlocks.write_cells = in_two_halves  # type: ignore[method-assign]
    source = BufferBlocks(num_blocks, LAYOUT)
    source.array[:] = 0xAB
    transport = _Watched(LAYOUT)
    size = LAYOUT.block_bytes
    sender = Sender(LAYOUT, source, {"shm": transport}, SenderConfig(frame_bytes=size, window_bytes=4 * size))
    ways = (Way("shm", path, bytes.fromhex(nonce)),)
    transfer = sender.open(PushTarget(TransferKey("a", 0), INSTANCE, ways, 0, num_blocks, 10.0))
    transfer.commit(tuple(range(num_blocks)), num_blocks * LAYOUT.block_size, FIRST)
    while (order := sys.stdin.readline().strip()) not in ("go", ""):
        assert transport.connection is not None
        frames = transport.connection._frames
        if order == "vanish":
            frames.hang_up(both_ways=True)
        else:
            child = subprocess.Popen(["sleep", "60"], pass_fds=(frames.fileno(),), stdout=subprocess.DEVNULL)
            say(str(child.pid))
    may_go_on.set()
    try:
        transfer.done.result(10)
    except PdserveError as error:
        say(error.reason)
    else:
        say("acked")
    sys.stdin.read()
    sender.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
