"""Whether a Ray answers is asked before Ray itself tries for minutes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from ray.exceptions import AuthenticationError

from cluster import launch
from cluster.actors import handles
from cluster.actors.handles import connected
from cluster.config_file import parse_config
from cluster.ending import end_cluster
from cluster.errors import LaunchError, PartError
from cluster.nodes.network import Bind
from cluster.state import ClusterRecord, read_record, write_record


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


def test_where_no_ray_runs_that_is_told_and_what_ran_in_one_is_gone(
    reached: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: None)
    told = "^Ray at auto cannot be reached: Could not find any running Ray"
    with pytest.raises(PartError, match=told), connected("auto"):
        pass
    assert reached == []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    record = ClusterRecord(name="x", router="127.0.0.1:50051", ray_address="auto")
    write_record(record)
    end_cluster(record)
    assert read_record("x") is None


def test_a_token_that_is_missing_is_told(
    answering: str, reached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise AuthenticationError("Token authentication is enabled but no authentication token was found")

    monkeypatch.setattr(handles.ray, "init", refuse)
    told = f"^Ray at {answering} cannot be reached: Token authentication .* RAY_AUTH_TOKEN_PATH"
    with pytest.raises(PartError, match=told), connected(answering):
        pass


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All that is asked of a Ray in which a cluster is to be started; it can start nothing."""
    done: list[str] = []

    @contextmanager
    def connected_to(address: str) -> Iterator[None]:
        done.append(f"connect {address}")
        yield

    def start(*_: object) -> None:
        done.append("start")
        raise PartError("it starts nothing")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "resolve_model", lambda *_: tmp_path)
    monkeypatch.setattr(handles, "connected", connected_to)
    monkeypatch.setattr(handles, "bind_here", lambda _: Bind.LOOPBACK)
    monkeypatch.setattr(handles, "actors_of", lambda _: {})
    monkeypatch.setattr(handles, "start_controller", start)
    monkeypatch.setattr(handles, "end_actors", lambda name: done.append(f"end {name}"))
    return done


def up(address: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        router = f"{{grpc: '127.0.0.1:{probe.getsockname()[1]}'}}"
    text = f"name: x\nrouter: {router}\npools: {{colocated: {{}}}}\nray: {{address: '{address}'}}\n"
    launch.up(parse_config(text, "f"), lambda what, how: None)


@pytest.mark.parametrize(
    ("address", "found"), [("auto", "10.0.0.7:6379"), ("10.0.0.9:6379", "10.0.0.9:6379")]
)
def test_the_ray_that_auto_found_is_the_one_in_which_a_cluster_is_ended(
    address: str, found: str, guest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another shell may be without RAY_ADDRESS."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    monkeypatch.setattr(handles, "end_actors", lambda name: guest.append(recorded(name)))
    with pytest.raises(LaunchError, match="it starts nothing"):
        up(address)
    assert guest == [f"connect {found}", "start", f"connect {found}", found]
    assert read_record("x") is None


def recorded(name: str) -> str:
    record = read_record(name)
    assert record is not None
    return str(record.ray_address)


def test_a_cluster_of_the_same_name_from_elsewhere_is_let_be(
    guest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "actors_of", lambda _: {"controller": object()})
    with pytest.raises(LaunchError, match=r'this Ray has a cluster "x" already, .* another name'):
        up("10.0.0.9:6379")
    assert guest == ["connect 10.0.0.9:6379"]  # nothing started, nothing ended


def test_a_ray_that_cannot_be_reached_any_more_is_told_with_the_way_out(
    guest: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then `up` and `down` of the name would both refuse."""
    record = ClusterRecord(name="x", router="127.0.0.1:50051", ray_address="10.0.0.9:6379")

    def unreachable(address: str) -> None:
        raise PartError(f"Ray at {address} cannot be reached: no route to host") from OSError()

    monkeypatch.setattr(handles, "connected", unreachable)
    with pytest.raises(PartError, match=f"no route to host .*: rm -r {tmp_path}/pdserve/x"):
        end_cluster(record)
