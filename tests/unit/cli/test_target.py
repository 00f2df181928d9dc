"""Which router a command speaks to, and with what it shows: by options, the environment, and the record."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from cluster.nodes.processes import ProcessId
from cluster.state import ClusterRecord, cluster_folder, router_socket, write_record
from pdserve.cli import target
from pdserve.cli.app import app
from pdserve.cli.console import error_line
from pdserve.cli.target import Choice, Target, asks_router
from pdserve.client import Credentials
from pdserve.v1.errors import Unauthenticated, Unavailable
from tests.certificates import Authority
from tests.cluster.commands import free_port

VARIABLES = ("API_KEY", "API_KEY_FILE", "TLS", "CA", "CERT", "KEY")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    for name in VARIABLES:
        monkeypatch.delenv(f"PDSERVE_{name}", raising=False)
    return tmp_path


@pytest.fixture
def pem(tmp_path: Path) -> str:
    return str(Authority(tmp_path, "some").cert)


def chosen(*arguments: str) -> Target:
    """By a command with an argument and an option of its own."""
    found: list[Target] = []
    command = typer.Typer()

    @command.command()
    @asks_router
    def ask(choice: Choice, word: str, times: int = 1) -> None:
        assert (word, times) == ("hello", 2)
        found.append(choice.target())

    done = CliRunner().invoke(command, ("hello", "--times", "2", *arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return found[0]


def test_options_say_what_is_shown(pem: str, tmp_path: Path) -> None:
    at = ("--address", "pd.example.org:1")
    assert chosen(*at) == Target("pd.example.org:1")
    assert chosen(*at, "--tls").credentials == Credentials(tls=True)
    assert chosen(*at, "--ca", pem).credentials == Credentials(ca=Path(pem))
    own = Authority(tmp_path, "own").issue("me")
    mutual = chosen(*at, "--ca", pem, "--cert", str(own.cert), "--key", str(own.key)).credentials
    assert mutual == Credentials(ca=Path(pem), cert=own.cert, key=own.key)


def test_files_that_no_handshake_could_use_are_wrong_usage(pem: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "own")
    own, other, old = authority.issue("me"), authority.issue("other"), authority.issue("old", for_days=-0.5)
    for arguments, told in (
        (("--ca", str(own.key)), f"--ca: '{own.key}' holds no certificate in PEM"),
        (("--cert", str(own.cert), "--key", str(other.key)), "is not the key of the certificate"),
        (("--cert", str(old.cert), "--key", str(old.key)), "--cert: the certificate of"),
    ):
        done = run("status", "--address", "127.0.0.1:1", *arguments)
        assert done.exit_code == 2
        assert told in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("Socket closed", "may want TLS"),
        ("Cannot check peer: missing selected ALPN property.", "is this the HTTP port?"),
        (
            "Custom verification check failed with error: Hostname Verification Check failed.",
            "is not for the",
        ),
        ("Tls handshake failed: SSL_ERROR_SSL: WRONG_VERSION_NUMBER: x: OK", "speaks no TLS"),
        ("Tls handshake failed: CERTIFICATE_VERIFY_FAILED: self signed certificate: OK", "--ca"),
        ("Connection refused", ": Connection refused"),
    ],
)
def test_a_handshake_that_failed_is_told_in_words(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7: {words}"
    error_line(Unavailable(said))
    shown = capsys.readouterr().err
    assert shown.startswith("error: no router answers there: 127.0.0.1:7: ")
    assert told in shown


def test_the_environment_says_it_too_and_a_key_comes_from_there_or_from_a_file(
    pem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "from-the-environment")
    monkeypatch.setenv("PDSERVE_CA", pem)
    shown = chosen("--address", "a:1").credentials
    assert shown == Credentials("from-the-environment", ca=Path(pem))
    assert "from-the-environment" not in repr(shown)
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    assert chosen("--address", "a:1", "--api-key-file", str(file)).credentials.api_key == "from-a-file"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("command", [["status"], ["top"], ["generate", "hi"], ["scale", "decode=1"]])
def test_half_a_certificate_and_a_file_of_many_words_are_wrong_usage(
    command: list[str], pem: str, tmp_path: Path
) -> None:
    words = tmp_path / "words"
    words.write_text("two words")
    for arguments, told in (
        (("--cert", pem), "--cert and --key go together"),
        (("--api-key-file", str(words)), "holds the key and nothing else"),
        (("--name", "x"), "give --address or --name, not both"),
    ):
        done = run(*command, "--address", "127.0.0.1:1", *arguments)
        assert done.exit_code == 2
        assert told in done.output


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_cluster_of_this_machine_is_reached_without_certificates(
    home: Path, pem: str, is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = ProcessId.of(os.getppid())
    record = ClusterRecord(
        name="here",
        router="127.0.0.1:1",
        ray_folder=home / "none",
        processes=(parent,),
        is_guarded=is_guarded,
    )
    write_record(record)
    monkeypatch.setenv("PDSERVE_API_KEY", "mine")
    asked = chosen("--ca", pem)
    assert asked.credentials == Credentials("mine")
    if not is_guarded:
        assert asked.address == "127.0.0.1:1"
        return
    path = router_socket(cluster_folder("here"), 0)
    path.touch()
    assert Path(asked.address.removeprefix("unix:")).samefile(path)


def test_a_missing_key_is_explained_to_who_types(capsys: pytest.CaptureFixture[str]) -> None:
    error_line(Unauthenticated("an API key is needed"))
    assert "PDSERVE_API_KEY" in capsys.readouterr().err


def test_a_target_makes_a_client(pem: str) -> None:
    async def make() -> None:
        await Target("127.0.0.1:1", Credentials("x")).client().close()

    asyncio.run(make())


def test_of_several_routers_the_first_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = f"127.0.0.1:{free_port()}"
    choice = Choice(None, None, Credentials())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        living = f"127.0.0.1:{listening.getsockname()[1]}"
        record = ClusterRecord(name="x", router=dead, routers=(dead, living))
        monkeypatch.setattr(target, "find_cluster", lambda name: record)
        assert choice.target().address == living
    # Nobody answers: the command says so of the first.
    assert choice.target().address == dead
