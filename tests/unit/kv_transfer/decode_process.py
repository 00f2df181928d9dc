"""A decode worker's end of collective hand-overs, in a process that may be stopped and killed:
`decode_process`. It says its address; then each line on stdin is a transfer to reserve blocks for,
or "hold": the first payload that arrives then is not answered before "go", and "half" is said. It ends with
stdin.
"""

from __future__ import annotations

import sys
import threading

from engine.reservations import BlockReservation
from kv_transfer.blocks import BufferBlocks
from kv_transfer.frame import TransferKey
from kv_transfer.landing import ReservedLanding
from kv_transfer.receiver import Receiver
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.transport.collective_server import CollectiveStreams
from kv_transfer.transport.grpc import GrpcPushServer
from tests.trusted import TRUST
from tests.unit.kv_transfer.hand_over import INSTANCE, Events
from tests.unit.kv_transfer.pair_process import LAYOUT, NUM_BLOCKS, say


def main() -> None:
    table = ReservationTable(Events(), LAYOUT)
    target = BufferBlocks(NUM_BLOCKS, LAYOUT)
    receiver = Receiver(INSTANCE, LAYOUT, target, table)
    streams = CollectiveStreams(receiver, target, "127.0.0.1")
    server = GrpcPushServer(receiver, TRUST, "127.0.0.1", 0, LAYOUT.block_bytes, kinds=[streams])
    server.start()
    may_go_on = threading.Event()
    may_go_on.set()
    done = ReservedLanding.done

    def done_or_held(self: ReservedLanding) -> bytes:
        if not may_go_on.is_set():
            say("half")
            may_go_on.wait()
        return done(self)

    ReservedLanding.done = done_or_held  # type: ignore[method-assign]
    say(server.address)
    for line in sys.stdin:
        order = line.strip()
        if order == "hold":
            may_go_on.clear()
        elif order == "go":
            may_go_on.set()
        else:
            for old in list(table._living):
                table.release(old)
            table.add(TransferKey(order, 0), BlockReservation(0, tuple(range(NUM_BLOCKS)), 0, 0, True), 30.0)
        say("done")
    server.stop()


if __name__ == "__main__":
    main()
