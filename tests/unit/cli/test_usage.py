"""Commands as they are typed, as far as they come without a cluster."""

from __future__ import annotations

import importlib.abc
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.errors import StateError
from cluster.nodes.processes import ProcessId
from cluster.state import ClusterRecord, write_record
from pdserve.cli import generate as generate_command
from pdserve.cli import status as status_command
from pdserve.cli.answer import Answer
from pdserve.cli.app import app
from pdserve.cli.main import main
from pdserve.cli.target import Target
from pdserve.client import (
    ChatMessage,
    Client,
    Cluster,
    GenerateOptions,
    PdserveError,
    Pool,
    Prompt,
    Role,
    Unavailable,
    WorkerState,
)
from pdserve.cluster_results import Quantiles, RouterLoad
from tests.unit.cli.test_shown import pool as pool_of

NONE = Quantiles(0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    # Messages are not broken into lines.
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def run(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


def cluster_named(name: str) -> Cluster:
    load = RouterLoad(0, 0, 0, 0, 0.0, 0.0, NONE, NONE)
    return Cluster(name, 1, "a-model", f"{name}:1", None, (), load)


def pretend_to_run(home: Path, *names: str) -> None:
    """Clusters whose only process is our parent; this process itself would not count."""
    for name in names:
        write_record(
            ClusterRecord(
                name=name,
                router=f"{name}:1",
                ray_folder=home / "none",
                processes=(ProcessId.of(os.getppid()),),
            )
        )


@pytest.mark.parametrize("address", ["foo", "", "foo:", "foo:0", "foo:99999", ":50051", "a b:1"])
def test_an_address_that_is_none_is_wrong_usage(address: str) -> None:
    for command in (
        ["status"],
        ["generate", "hi"],
        ["scale", "decode=1"],
        ["drain", "decode-0"],
        ["restart"],
    ):
        done = run(*command, "--address", address)
        assert done.exit_code == 2
        assert "is not host:port, like 127.0.0.1:50051" in done.output


@pytest.mark.parametrize(
    ("pools", "told"),
    [
        (["prefill=1", "prefill=2"], "prefill stands twice"),
        (["prefill=-1"], "'prefill=-1': a pool has 0 to 1024 workers"),
        (["prefill=two"], "'prefill=two': a pool has 0 to 1024 workers"),
        (["prefill=99999999999999999999"], "a pool has 0 to 1024 workers"),
        (["prefill"], "'prefill' is not POOL=N, like prefill=2 or decode=2"),
    ],
)
def test_scale_says_what_is_wrong(pools: list[str], told: str) -> None:
    done = run("scale", *pools, "--address", "127.0.0.1:1")
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.parametrize("pools", [["nope=1"], ["decode=2", "colocated=1"]])
def test_scale_names_the_pools_that_the_cluster_has(
    pools: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tuple(Pool(role, 1, (), None) for role in (Role.PREFILL, Role.DECODE))

    async def get_cluster(self: Client, *, timeout: float | None = None) -> Cluster:
        return replace(cluster_named("one"), pools=there)

    async def scale_pool(self: Client, role: Role, target: int, *, timeout: float | None = None) -> Cluster:
        raise AssertionError("a pool was scaled")

    monkeypatch.setattr(Client, "get_cluster", get_cluster)
    monkeypatch.setattr(Client, "scale_pool", scale_pool)
    done = run("scale", *pools, "--address", "127.0.0.1:1")
    assert done.exit_code == 2
    assert f"there is no pool '{pools[-1][:-2]}'; one has prefill and decode" in done.output


@pytest.mark.parametrize("command", [("drain", "decode-0"), ("restart",), ("scale", "decode=1")])
def test_no_time_is_below_zero(command: Sequence[str]) -> None:
    done = run(*command, "--timeout", "-1", "--address", "127.0.0.1:1")
    assert done.exit_code == 2
    assert "'--timeout': Input should be greater than or equal to 0" in done.output


def test_who_drains_a_pools_last_worker_is_told_that_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    before = replace(cluster_named("one"), pools=(pool_of(Role.DECODE, 1, WorkerState.READY),))
    after = replace(before, pools=(replace(before.pools[0], target=0),))

    async def get_cluster(self: Client, *, timeout: float | None = None) -> Cluster:
        return before

    async def drain_worker(self: Client, worker_id: str, **how: object) -> Cluster:
        return before if how["replace"] else after

    monkeypatch.setattr(Client, "get_cluster", get_cluster)
    monkeypatch.setattr(Client, "drain_worker", drain_worker)
    at = ("--address", "127.0.0.1:1", "--no-wait")
    told = "decode has no worker then: requests wait"
    assert told in run("drain", "decode-0", *at).stderr
    assert told not in run("drain", "decode-0", "--replace", *at).stderr


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """The prompts that `generate` has sent."""
    prompts: list[Prompt] = []

    async def stream(
        target: Target, prompt: Prompt, options: object, timeout: float | None, live: bool, begun: object
    ) -> list[Answer]:
        prompts.append(prompt)
        return []

    monkeypatch.setattr(generate_command, "stream", stream)
    return prompts


def test_a_pipe_is_the_prompt(asked: list[Prompt]) -> None:
    at = ("--address", "127.0.0.1:1")
    for arguments in (["generate"], ["generate", "-"]):
        assert run(*arguments, *at, stdin="Grüße".encode()).exit_code == 0
    assert run("generate", "--chat", *at, stdin=b"hi").exit_code == 0
    # Who gives a prompt, or token ids, has nothing to say on stdin.
    assert run("generate", "words", *at, stdin=b"more").exit_code == 0
    assert run("generate", "--token-ids", "1,2", *at, stdin=b"more").exit_code == 0
    assert asked == ["Grüße", "Grüße", [ChatMessage("user", "hi")], "words", [1, 2]]


def test_a_pipe_without_a_prompt_is_wrong_usage(asked: list[Prompt]) -> None:
    for stdin, told in (
        (b"", "give a prompt or --token-ids"),
        (b"ab\xff", "stdin is not UTF-8: see its byte 2"),
    ):
        done = run("generate", "--address", "127.0.0.1:1", stdin=stdin)
        assert done.exit_code == 2
        assert told in done.output
    assert asked == []


def test_what_the_answer_must_be_comes_from_files_and_words(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Mapping[str, object]] = []

    async def stream(
        target: Target,
        prompt: Prompt,
        options: GenerateOptions,
        timeout: float | None,
        live: bool,
        begun: object,
    ) -> list[Answer]:
        sent.append(options)
        return []

    monkeypatch.setattr(generate_command, "stream", stream)
    schema, lark = home / "schema.json", home / "sum.lark"
    schema.write_text('{"type": "object"}')
    lark.write_text('start: "ä"', encoding="utf-8")
    for arguments in (["--json-schema", str(schema)], ["--grammar", str(lark)], ["--regex", "a+"]):
        assert run("generate", "hi", *arguments, "--address", "127.0.0.1:1").exit_code == 0
    names = ("json_schema", "grammar", "regex")
    assert [{name: each[name] for name in names if name in each} for each in sent] == [
        {"json_schema": '{"type": "object"}'},
        {"grammar": 'start: "ä"'},
        {"regex": "a+"},
    ]
    lark.write_bytes(b"a\xff")
    for path, told in ((home / "none", "No such file"), (lark, "is not UTF-8: see its byte 1")):
        done = run("generate", "hi", "--grammar", str(path), "--address", "127.0.0.1:1")
        assert done.exit_code == 2
        assert told in done.output


def test_a_wrong_name_is_answered_with_those_that_run(home: Path) -> None:
    pretend_to_run(home, "one", "two")
    for command in (["down", "nope"], ["status", "--name", "nope"]):
        error = run(*command).exception
        assert isinstance(error, StateError)
        assert str(error).endswith("; these run: one, two") or str(error).endswith("; these do: one, two")
    assert not (home / "pdserve" / "nope").exists()


def test_status_shows_all_clusters_that_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_run(home, "one", "three", "two")

    async def get_cluster(target: Target) -> Cluster:
        if target.address == "three:1":
            raise Unavailable("it does not answer")
        return cluster_named(target.address.partition(":")[0])

    monkeypatch.setattr(status_command, "_get_cluster", get_cluster)
    done = run("status")
    assert "one  model" in done.output
    assert "two  model" in done.output
    assert "error: cluster three: it does not answer" in done.output
    assert done.exit_code == 1
    assert run("status", "--name", "one", "--json").stdout.startswith('{"name": "one"')
    assert run("status", "--json").stdout.startswith('{"clusters": [{"name": "one"')
    assert isinstance(run("status", "--name", "three").exception, PdserveError)


class _Interrupted(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pdserve.cli.app":
            raise KeyboardInterrupt


def test_ctrl_c_while_the_commands_load_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finders: Sequence[object] = [_Interrupted(), *sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.delitem(sys.modules, "pdserve.cli.app")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("command", ["check", "generate", "status", "scale", "drain", "restart"])
def test_help_shows_a_flag_without_a_value(command: str) -> None:
    flags = ("--json", "--chat", "--explain", "--wait", "--replace", "--surge")
    lines = [
        line for line in run(command, "--help").output.splitlines() if any(flag in line for flag in flags)
    ]
    assert lines != []
    assert [line for line in lines if "<bool>" in line] == []


@pytest.mark.parametrize("what", ["missing", "a folder", "no program"])
def test_an_interpreter_for_vllm_that_cannot_be_run_is_wrong_usage_before_a_model_is_loaded(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "python"
    if what == "a folder":
        path.mkdir()
    elif what == "no program":
        path.write_text("")
    done = run("bench", "engine", "--model", str(tmp_path / "none"), "--vllm-python", str(path))
    assert done.exit_code == 2
    assert f"there is no program {path}" in done.output.replace("\n", "")


@pytest.mark.parametrize(
    ("redirection", "code", "told"),
    [(">&-", 0, "the key"), (">/dev/full", 1, "error: [Errno 28] No space left on device")],
    ids=["closed", "full"],
)
def test_a_stdout_that_takes_nothing_ends_without_a_traceback(redirection: str, code: int, told: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m pdserve.cli.main key new alice {redirection}"
    ended = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=100)
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False)
    assert told in ended.stderr
