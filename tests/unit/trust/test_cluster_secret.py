"""The cluster's secret: who shows it, where it lies, and that it is in nothing that is printed."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest

from trust.errors import TrustError
from trust.secret import KEY, Secret, read_secret
from trust.trust import Trust, TrustFiles


def test_what_was_written_is_read_and_shown(tmp_path: Path) -> None:
    made = Secret.fresh()
    made.write(tmp_path / "secret")
    read = read_secret(tmp_path / "secret")
    assert made.is_shown_in([read.shown])
    assert read.is_shown_in([("other", "x"), made.shown])


@pytest.mark.parametrize("other", ["", "0", "x" * 64, "ä" * 32])
def test_another_secret_is_none(other: str) -> None:
    secret = Secret.fresh()
    assert not secret.is_shown_in([(KEY, other)])
    assert not secret.is_shown_in([(KEY, other.encode())])
    assert not secret.is_shown_in([(KEY, secret.text[:-1])])
    assert not secret.is_shown_in([("authorization", secret.text)])
    assert not secret.is_shown_in([])


def test_a_call_may_not_try_several() -> None:
    secret = Secret.fresh()
    assert not secret.is_shown_in([secret.shown, (KEY, "guess")])
    assert not secret.is_shown_in([secret.shown, secret.shown])


def test_two_secrets_differ_and_are_long() -> None:
    assert len({Secret.fresh().text for _ in range(8)}) == 8
    assert len(Secret.fresh().text) == 64


def test_its_user_alone_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Secret.fresh().write(tmp_path / "secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_who_has_an_old_one_open_reads_no_new_one(tmp_path: Path) -> None:
    path, old = tmp_path / "secret", Secret.fresh()
    old.write(path)
    with open(path) as opened:
        Secret.fresh().write(path)
        assert opened.read() == old.text


@pytest.mark.parametrize(
    ("content", "mode", "complaint"),
    [
        (b"a" * 64, 0o640, "could be read by others"),
        (b"a" * 63, 0o600, "too short"),
        (b"", 0o600, "too short"),
        (b"\xff" * 64, 0o600, "no text"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes, mode: int, complaint: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(TrustError, match=complaint) as refused:
        read_secret(path)
    assert str(path) in str(refused.value)
    assert "aaa" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrustError, match=r"secret.* cannot be read: No such file"):
        TrustFiles(secret=tmp_path / "secret").read()


def test_no_words_for_it_hold_it() -> None:
    trust = Trust.fresh()
    for words in (repr(trust), str(trust), repr(trust.secret), f"{trust.secret}"):
        assert trust.secret.text not in words


def test_it_travels_to_other_processes() -> None:
    trust = Trust.fresh()
    there: Trust = pickle.loads(pickle.dumps(trust))  # as Ray does
    assert there.secret.is_shown_in([trust.secret.shown])
