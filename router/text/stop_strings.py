"""Finds stop strings in text that arrives in pieces. Knows text only, no tokens.

What may be the beginning of a stop string is held back until it is decided: text that has gone out to a
client cannot be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    stop: str
    # Text before the stop string that has not gone out yet.
    text: str


class StopStrings:
    """`push` gives the text that may go out, or the match that ends everything."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""

    def push(self, piece: str) -> str | Match:
        """The earliest match wins; of two that begin at one place, the one that is whole first."""
        if not self._stops:
            return piece
        text = self._held + piece
        if (match := self._first_match(text)) is not None:
            self._held = ""
            return match
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and turned out to be plain text."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> Match | None:
        found = [(text.find(stop), len(stop), stop) for stop in self._stops if stop in text]
        if not found:
            return None
        # Whole first, by where it ends: what a character-by-character reader would have stopped at.
        begin, _, stop = min(found, key=lambda each: (each[0] + each[1], each[0]))
        return Match(stop, text[:begin])

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
