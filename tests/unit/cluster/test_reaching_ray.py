"""Whether a Ray answers is asked before Ray itself tries for minutes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cluster.actors import handles
from cluster.actors.handles import connected
from cluster.errors import PartError


@pytest.fixture
def answering() -> Iterator[str]:
    """Where somebody speaks gRPC."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(10)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that Ray itself is told to connect to."""
    told: list[str] = []
    monkeypatch.setattr(handles.ray, "init", lambda address, **_: told.append(address))
    monkeypatch.setattr(handles.ray, "shutdown", lambda: None)
    return told


def test_a_ray_is_reached_past_the_proxy_of_the_environment(
    answering: str, reached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    with connected(answering):
        assert reached == [answering]


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://head:10001", "head"])
def test_a_ray_address_of_the_environment_that_is_none_is_told(
    address: str, reached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    told = f"^Ray at auto cannot be reached: .*RAY_ADDRESS: '{address}'"
    with pytest.raises(PartError, match=told), connected("auto"):
        pass
    assert reached == []
