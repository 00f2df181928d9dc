"""A prefill worker's end of collective hand-overs, in a process that may be stopped and killed:
`pair_process ADDRESS`. A line on stdin names a transfer; "announce NAME" ends the process when its first
header has left, and "open NAME" opens it and no more. It says how each ended, and ends with stdin.
"""

from __future__ import annotations

import os
import signal
import sys

from kv_transfer.blocks import BufferBlocks
from kv_transfer.frame import TransferKey
from kv_transfer.layout import KVLayout
from kv_transfer.send_queue import SenderConfig
from kv_transfer.sender import Sender
from kv_transfer.transfer import PushTarget
from kv_transfer.transport.collective import CollectiveConnection, CollectiveTransport
from kv_transfer.transport.grpc import GrpcTransport
from kv_transfer.ways import Way
from pdserve.v1.errors import PdserveError
from tests.trusted import TRUST
from tests.unit.kv_transfer.hand_over import FIRST, INSTANCE

# Blocks of 32 MiB: sending one takes long enough to be met in the middle.
LAYOUT = KVLayout(1, 1, 1, 32 << 17, "float32", "large")
NUM_BLOCKS = 2


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(address: str) -> None:
    source = BufferBlocks(NUM_BLOCKS, LAYOUT)
    source.array[:] = 0xAB
    wire = GrpcTransport(TRUST, LAYOUT.block_bytes)
    transports = {"collective": CollectiveTransport(source, wire), "grpc": wire}
    sender = Sender(LAYOUT, source, transports, SenderConfig(ack_timeout_s=5.0))
    ways = (Way("collective", address), Way("grpc", address))
    say("ready")
    for line in sys.stdin:
        order, _, name = line.strip().rpartition(" ")
        target = PushTarget(TransferKey(name, 0), INSTANCE, ways, 0, NUM_BLOCKS, 10.0)
        if order == "announce":
            CollectiveConnection._send_payload = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        transfer = sender.open(target)
        if order == "open":
            say("opened")
            continue
        transfer.commit((0, 1), NUM_BLOCKS * LAYOUT.block_size, FIRST)
        try:
            transfer.done.result(20)
        except PdserveError as error:
            say(error.reason)
        else:
            say(next(iter(sender.routes().values())))
    sender.close()


if __name__ == "__main__":
    main(sys.argv[1])
