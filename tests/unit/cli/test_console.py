"""What of an answer reaches a terminal, and a pipe."""

from __future__ import annotations

import sys

import pytest

from pdserve.cli.console import write


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\tone\r\ntwo\n", "\tone\ntwo\n"),
        ("é 👩‍🚀 \u202f€", "é 👩‍🚀 \u202f€"),
        ("\x1b]52;c;aGk=\x07", "␛]52;c;aGk=␇"),
        ("\x9b2J\x7f\x08safe\rsure", "�2J␡␈safesure"),
    ],
)
def test_an_answer_gives_no_orders_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, shown: str
) -> None:
    write(said)
    assert capsys.readouterr().out == said
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write(said)
    assert capsys.readouterr().out == shown
