"""KV under and over every limit that a message has by default, in one block and in many."""

from __future__ import annotations

import numpy as np
import pytest

from kv_transfer.layout import KVLayout
from tests.unit.kv_transfer.hand_over import HandOver

MIB = 1024 * 1024
# gRPC refuses messages over 4 MiB where nothing else is said; 70 MiB are more than a frame may hold.
SIZES_MIB = [1, 5, 70]
WAIT_S = 60.0


def layout_of(block_bytes: int) -> KVLayout:
    """Of two layers; K and V of one head, of float32."""
    head_dim = 64
    return KVLayout(2, 1, head_dim, block_bytes // (2 * 2 * head_dim * 4), "float32", "large")


def hand_over(transport: str, size_mib: int, num_blocks: int) -> None:
    layout = layout_of(size_mib * MIB // num_blocks)
    assert layout.block_bytes * num_blocks == size_mib * MIB
    with HandOver(transport, layout, num_blocks) as both:
        both.source.array &= 0x3F  # no byte of a NaN, as which KV that was not computed is known
        source = tuple(range(num_blocks))
        target = both.reserve("a", source[::-1], lease_s=WAIT_S)
        report = both.send_all(target, source).done.result(WAIT_S)
        assert report is not None
        assert report.transfer_bytes == size_mib * MIB
        both.events.wait_for("ready", target.key)
        assert both.table.consume(target.key) is not None
        assert np.array_equal(both.target.array[::-1], both.source.array)


@pytest.mark.parametrize("transport", ["memory", "grpc", "shm", "collective"])
def test_five_mebibytes_arrive_in_one_block(transport: str) -> None:
    hand_over(transport, 5, 1)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["memory", "grpc", "shm", "collective"])
@pytest.mark.parametrize("size_mib", SIZES_MIB)
@pytest.mark.parametrize("num_blocks", [1, 2, 64])
def test_kv_of_any_size_arrives(transport: str, size_mib: int, num_blocks: int) -> None:
    hand_over(transport, size_mib, num_blocks)
