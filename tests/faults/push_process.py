"""Pushes blocks as a prefill worker would:
`push_process.py TRANSPORT ADDRESS NONCE_IN_HEX NUM_TRANSFERS NUM_BLOCKS`.
"""

from __future__ import annotations

import sys

from kv_transfer.blocks import BufferBlocks
from kv_transfer.frame import TransferKey
from kv_transfer.sender import Sender
from kv_transfer.transfer import PushTarget
from kv_transfer.ways import Way
from tests.faults.test_streams_while_kv_moves import LAYOUT
from tests.unit.kv_transfer.hand_over import FIRST, INSTANCE, make_transport


def main(name: str, address: str, nonce: str, num_transfers: int, num_blocks: int) -> None:
    blocks = BufferBlocks(num_blocks, LAYOUT)
    ways = (Way(name, address, bytes.fromhex(nonce) or None),)
    sender = Sender(LAYOUT, blocks, {name: make_transport(name, blocks, LAYOUT)})
    for number in range(num_transfers):
        key = TransferKey(f"t{number}", 0)
        transfer = sender.open(PushTarget(key, INSTANCE, ways, 0, num_blocks, 60.0))
        transfer.commit(tuple(range(num_blocks)), num_blocks * LAYOUT.block_size, FIRST)
        transfer.done.result(60)
    sender.close()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))
