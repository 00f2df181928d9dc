from __future__ import annotations

import os

import pytest
import torch

from cluster.actors.kv_ways import make_endpoint
from cluster.config import TransportName
from engine.kv_pool import AllocateMemory, KVPool, allocate_memory
from kv_transfer.blocks import BufferBlocks
from kv_transfer.receiver import Receiver
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.shared_pool import PoolMemory
from tests.trusted import TRUST
from tests.unit.kv_transfer.hand_over import LAYOUT, Events


def offered(transport: TransportName, memory: PoolMemory, is_shared: bool) -> list[str]:
    """The names of the ways of a worker whose pool was taken from that memory, or from elsewhere."""
    allocate: AllocateMemory = memory if is_shared else allocate_memory
    pool = KVPool(LAYOUT, 4, torch.device("cpu"), allocate)
    table = ReservationTable(Events(), LAYOUT)
    receiver = Receiver("instance", LAYOUT, BufferBlocks(4, LAYOUT), table)
    endpoint = make_endpoint(TRUST, transport, pool, memory, "127.0.0.1", receiver)
    try:
        return [way.transport for way in endpoint.ways]
    finally:
        endpoint.stop()


@pytest.mark.parametrize(
    ("transport", "ways"),
    [
        (TransportName.AUTO, ["shm", "grpc"]),
        (TransportName.SHM, ["shm"]),
        (TransportName.COLLECTIVE, ["collective", "grpc"]),
        (TransportName.GRPC, ["grpc"]),
    ],
)
def test_a_worker_offers_what_is_configured(transport: TransportName, ways: list[str]) -> None:
    assert offered(transport, PoolMemory(), is_shared=True) == ways


@pytest.mark.parametrize("lacking", ["memory", "pidfd", "folder"])
def test_where_memory_cannot_be_shared_auto_says_so_and_offers_the_network(
    lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError("not in this sandbox")

    if lacking == "pidfd":
        monkeypatch.setattr(os, "pidfd_open", refuse)
    elif lacking == "folder":
        monkeypatch.setattr("kv_transfer.socket_folder.tempfile.mkdtemp", refuse)
    memory = PoolMemory()
    assert offered(TransportName.AUTO, memory, is_shared=lacking != "memory") == ["grpc"]
    assert "KV cannot come by shm: " in caplog.text
    with pytest.raises(RuntimeError, match="KV cannot come by shm: "):
        offered(TransportName.SHM, memory, is_shared=lacking != "memory")
