"""Pushes random blocks as a prefill worker would: `push_process.py ADDRESS NUM_TRANSFERS NUM_BLOCKS`."""

from __future__ import annotations

import sys

from kv_transfer.blocks import BufferBlocks
from kv_transfer.frame import TransferKey
from kv_transfer.sender import Sender
from kv_transfer.transfer import PushTarget
from kv_transfer.transport.grpc import GrpcTransport
from kv_transfer.ways import Way
from tests.faults.test_streams_while_kv_moves import LAYOUT
from tests.unit.kv_transfer.hand_over import FIRST, INSTANCE


def main(address: str, num_transfers: int, num_blocks: int) -> None:
    size = LAYOUT.block_bytes
    blocks = BufferBlocks(num_blocks, LAYOUT)
    ways = (Way("grpc", address),)
    sender = Sender(LAYOUT, blocks, {"grpc": GrpcTransport(size)})
    for number in range(num_transfers):
        key = TransferKey(f"t{number}", 0)
        transfer = sender.open(PushTarget(key, INSTANCE, ways, 0, num_blocks, 60.0))
        transfer.commit(tuple(range(num_blocks)), num_blocks * LAYOUT.block_size, FIRST)
        transfer.done.result(60)
    sender.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
