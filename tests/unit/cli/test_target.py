"""Which router of a cluster a command speaks to."""

from __future__ import annotations

import socket

import pytest

from cluster.state import ClusterRecord
from pdserve.cli import target
from tests.cluster.commands import free_port


def test_of_several_routers_the_first_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = f"127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        living = f"127.0.0.1:{listening.getsockname()[1]}"
        record = ClusterRecord(name="x", router=dead, routers=(dead, living))
        monkeypatch.setattr(target, "find_cluster", lambda name: record)
        assert target.router_address(None, None) == living
    # Nobody answers: the command says so of the first.
    assert target.router_address(None, None) == dead
