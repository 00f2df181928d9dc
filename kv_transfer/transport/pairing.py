"""Which pair belongs to a pool: by NCCL between GPUs, by Gloo between host memories."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Store

from kv_transfer.blocks import BlockStore, DeviceBlocks
from kv_transfer.transport.nccl_pair import NcclPair
from kv_transfer.transport.pair import GlooPair, Pair
from kv_transfer.transport.pair_messages import Hello
from kv_transfer.verify import Verify


def hello_of(blocks: BlockStore) -> Hello:
    backend = "nccl" if isinstance(blocks, DeviceBlocks) else "gloo"
    return Hello(backend, blocks.layout.layer_bytes)


def usual_verify(blocks: BlockStore) -> Verify:
    return Verify.OFF if isinstance(blocks, DeviceBlocks) else Verify.CHECKSUM


def device_of(blocks: BlockStore) -> torch.device:
    """Where the bytes that a pair moves lie."""
    return blocks.device if isinstance(blocks, DeviceBlocks) else torch.device("cpu")


def make_pair(blocks: BlockStore, store: Store, rank: int, host: str, timeout_s: float) -> Pair:
    """This end of it; `host` is an address of this end. Raises PairBroken."""
    if isinstance(blocks, DeviceBlocks):
        return NcclPair(store, rank, blocks, timeout_s)
    return GlooPair(store, rank, host, timeout_s)
