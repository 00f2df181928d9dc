"""A cluster that is open to a network: its user's commands need nothing, others keys and certificates."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from router.access.keys import Permission, new_key
from tests.certificates import Authority
from tests.cluster.commands import Commands, free_port
from tests.models import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(300)]

MARKER = "swordfish"


def test_a_guarded_cluster_serves_its_user_and_those_who_show_what_is_asked_for(commands: Commands) -> None:
    home = commands.home
    model = tiny_model(home / "model")
    authority = Authority(home)
    authority.issue("router")
    client = authority.issue("client")
    key, line = new_key("me", [Permission.GENERATE])
    (home / "keys").write_text(line)
    (home / "key").write_text(key)
    port, http_port = free_port(), free_port()
    path = write_config(home, model, port, http_port)
    commands_here = Commands(home, cwd=home)
    assert "expired" in commands_here.fail("up", write_old(authority, home, model, port))
    assert commands_here.record("guarded") is None

    served = commands_here.succeed("up", path)
    assert f"https://127.0.0.1:{http_port}" in served
    folder = home / "pdserve" / "guarded"
    assert stat.S_IMODE((folder / "router-0.sock").stat().st_mode) == 0o600

    own = json.loads(commands.succeed("generate", MARKER, "--max-tokens", "4", "--json"))
    assert json.loads(commands.succeed("status", "--json"))["router"]["tls"] is True
    at = ("--address", f"127.0.0.1:{port}", "--ca", str(authority.cert))
    mutual = (*at, "--cert", str(client.cert), "--key", str(client.key))
    shown = (*mutual, "--api-key-file", str(home / "key"))
    others = json.loads(commands.succeed("generate", MARKER, "--max-tokens", "4", "--json", *shown))
    assert others["token_ids"] == own["token_ids"]
    assert "API key is needed" in commands.fail("generate", MARKER, *mutual)
    assert "lacks the permission admin" in commands.fail("scale", "colocated=1", *shown)
    commands.fail("generate", MARKER, *at, "--timeout", "10")

    commands.succeed("down", "guarded")
    logs = [log.read_text() for log in (folder / "logs").iterdir()]
    assert any("FINISHED" in log for log in logs)
    assert not any(secret in log for log in logs for secret in (MARKER, key))
    assert not (folder / "router-0.sock").exists()


def write_config(home: Path, model: Path, port: int, http_port: int | None, cert: str = "router") -> str:
    """Paths are from where `up` runs."""
    http = "null" if http_port is None else f"127.0.0.1:{http_port}"
    path = home / f"{cert}.yaml"
    path.write_text(
        f"""\
name: guarded
model: {{id: "{model}"}}
router:
  grpc: "0.0.0.0:{port}"
  http: {http}
  tls: {{cert: {cert}.pem, key: {cert}.key, client_ca: ca.pem}}
  api_keys: {{file: keys}}
pools: {{colocated: {{engine: {{num_blocks: 64}}}}}}
observability: {{log_level: debug}}
"""
    )
    return str(path)


def write_old(authority: Authority, home: Path, model: Path, port: int) -> str:
    authority.issue("old", for_days=-0.5)
    return write_config(home, model, port, None, "old")
