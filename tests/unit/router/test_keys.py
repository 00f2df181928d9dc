"""Keys are known by their hashes, and what is said about them never quotes one."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from pdserve.v1.errors import PermissionDenied, Unauthenticated
from router.access import changes
from router.access.gate import ANY, Gate
from router.access.keys import PREFIX, Permission, find_key, new_key, parse_keys
from router.access.settings import ApiKeySource

GENERATE = frozenset({Permission.GENERATE})
ADMIN = frozenset({Permission.ADMIN})


def test_a_new_key_is_found_by_the_line_that_is_kept_of_it_and_no_other_is() -> None:
    alice, alices_line = new_key("alice", [Permission.GENERATE])
    bob, bobs_line = new_key("bob", [Permission.ADMIN, Permission.GENERATE])
    assert alice.startswith(PREFIX)
    assert alice not in alices_line
    assert bobs_line.startswith("bob generate,admin sha256:")
    keys = parse_keys(["# who may come in", "", alices_line, f"{bobs_line}  # until May"])
    found = [find_key(presented, keys) for presented in (alice, bob, alice[:-1], alice + "x", "", "\ud800")]
    assert [key.name if key is not None else None for key in found] == [
        "alice",
        "bob",
        None,
        None,
        None,
        None,
    ]
    assert find_key("x" * 100_000, keys) is None


def test_no_two_keys_are_alike() -> None:
    assert len({new_key("x", [Permission.ADMIN])[0] for _ in range(100)}) == 100


SECRET = new_key("x", [Permission.GENERATE])[0]
LINE = new_key("x", [Permission.GENERATE])[1]
BAD = {
    "the key itself": [LINE, SECRET],
    "a key in place of the hash": [f"x generate {SECRET}"],
    "a short hash": [LINE[:-1]],
    "an unknown permission": [LINE.replace("generate", SECRET)],
    "no permission": [LINE.replace("generate ", "")],
    "a name twice": [LINE, LINE],
    "a name of other letters": [LINE.replace("x ", "ü ", 1)],
    "nothing": ["", "# no key"],
}


@pytest.mark.parametrize("lines", BAD.values(), ids=BAD.keys())
def test_a_bad_line_is_named_and_never_quoted(lines: list[str]) -> None:
    with pytest.raises(ValueError, match=r"line|no key") as caught:
        parse_keys(lines)
    assert SECRET not in str(caught.value)


def source(*lines: str) -> ApiKeySource:
    return ApiKeySource(keys=lines)


def test_the_gate_asks_for_a_known_key_with_the_permission() -> None:
    user, users_line = new_key("user", [Permission.GENERATE])
    scraper, scrapers_line = new_key("prometheus", [Permission.METRICS])
    gate = Gate(source(users_line, scrapers_line))
    gate.check(f"Bearer {user}", GENERATE)
    gate.check(f"bearer  {user}", ANY)
    gate.check(f"Bearer {scraper}", ANY)
    as_password = base64.b64encode(f"anybody:{user}".encode()).decode()
    gate.check(f"Basic {as_password}", GENERATE)
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer ",
        user,
        f"Bearer {user[:-1]}",
        f"Digest {user}",
        "Basic ?",
        "Basic YQ==",
    ):
        with pytest.raises(Unauthenticated) as refused:
            gate.check(wrong, GENERATE)
        assert user not in str(refused.value)
    for key, permissions in ((user, ADMIN), (scraper, GENERATE), (scraper, ADMIN)):
        with pytest.raises(PermissionDenied) as denied:
            gate.check(f"Bearer {key}", permissions)
        assert key not in str(denied.value)


def test_without_keys_the_gate_is_open() -> None:
    Gate(None).check(None, ADMIN)


def test_a_changed_file_counts_at_once_and_a_broken_one_takes_no_key_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(changes, "_LOOK_EVERY_S", 0.0)
    old, old_line = new_key("old", [Permission.GENERATE])
    new, new_line = new_key("new", [Permission.GENERATE])
    file = tmp_path / "keys"
    file.write_text(old_line)
    gate = Gate(ApiKeySource(file=file))
    gate.check(f"Bearer {old}", GENERATE)
    replace(file, f"{new_line}\n")
    gate.check(f"Bearer {new}", GENERATE)
    with pytest.raises(Unauthenticated):
        gate.check(f"Bearer {old}", GENERATE)
    replace(file, f"{new_line}\n{old}\n")
    gate.check(f"Bearer {new}", GENERATE)
    file.unlink()
    gate.check(f"Bearer {new}", GENERATE)
    assert "stay as they were" in caplog.text
    assert old not in caplog.text


def replace(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)
