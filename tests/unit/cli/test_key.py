"""`pdserve key new`: the file gets a hash, its user the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pdserve.cli.app import app
from router.access.keys import PREFIX, Permission, find_key, parse_keys


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("key", "new", *arguments))


@pytest.mark.parametrize(
    ("flags", "permissions"),
    [
        ((), {Permission.GENERATE}),
        (("--generate", "--admin"), {Permission.GENERATE, Permission.ADMIN}),
        (("--metrics",), {Permission.METRICS}),
    ],
)
def test_stdout_is_a_line_for_the_file_and_stderr_has_its_key(
    flags: tuple[str, ...], permissions: set[Permission]
) -> None:
    made = run("alice", *flags)
    assert made.exit_code == 0
    (word,) = (word for word in made.stderr.split() if word.startswith(PREFIX))
    assert word not in made.stdout
    key = find_key(word, parse_keys(made.stdout.splitlines()))
    assert key is not None
    assert (key.name, key.permissions) == ("alice", frozenset(permissions))


def test_a_key_can_go_to_a_new_file_of_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "alice.key"
    made = run("alice", "--out", str(file))
    assert made.exit_code == 0
    assert PREFIX not in made.stdout + made.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    assert find_key(file.read_text().strip(), parse_keys(made.stdout.splitlines())) is not None
    again = run("alice", "--out", str(file))
    assert (again.exit_code, again.stdout) == (2, "")


def test_what_is_no_name_is_wrong_usage() -> None:
    assert run("a b").exit_code == 2
    assert run().exit_code == 2
