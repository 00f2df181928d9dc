"""The controller itself, without Ray: no worker is wanted, and its routers are none of its business here."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from cluster.actors.guard import Guard
from cluster.control import controller as controllers
from cluster.control.controller import Controller
from cluster.nodes.network import Bind
from cluster.state import control_file, write_whole
from cluster.trusted import make_secret, trust_files
from pdserve.v1.cluster_pb2 import GetClusterRequest
from pdserve.v1.cluster_pb2_grpc import ControlStub
from tests.unit.cluster.harness import config
from trust.channels import open_aio_channel


async def test_a_start_that_found_the_disk_full_is_done_anew_and_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_full = True

    def write(path: Path, text: str) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_whole(path, text)

    async def keep(guard: Guard) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(controllers, "die_with_parent", lambda: None)
    monkeypatch.setattr(controllers, "log_to", lambda *_: None)
    monkeypatch.setattr(controllers, "workers_of", lambda name: {})
    monkeypatch.setattr(controllers, "write_whole", write)
    monkeypatch.setattr(Guard, "keep", keep)
    make_secret(tmp_path)
    wanted = config(0, 0)
    controller = Controller(wanted, str(tmp_path), Bind.LOOPBACK)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            await controller.start()
    is_full = False
    address = await controller.start()
    assert address in control_file(tmp_path).read_text()
    async with open_aio_channel(address, trust_files(wanted, tmp_path).read()) as channel:
        assert (await ControlStub(channel).GetCluster(GetClusterRequest(), timeout=20)).name == "test"
    await controller.stop()
