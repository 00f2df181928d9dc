from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import Match, StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """The text that went out, and the stop that matched."""
    matcher, out = StopStrings(stops), ""
    for piece in pieces:
        found = matcher.push(piece)
        if isinstance(found, Match):
            return out + found.text, found.stop
        out += found
    return out + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        ([], ["any", "thing"], "anything", None),
        (["END"], ["the E", "N", "D of it"], "the ", "END"),
        (["END"], ["the EN", "x"], "the ENx", None),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["abc", "b"], ["a", "bc"], "a", "b"),
        (["bc", "abc"], ["xabc"], "x", "abc"),
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo", "\n\n"),
        (["END"], ["EN"], "EN", None),
    ],
)
def test_a_stop_is_found_across_pieces(
    stops: list[str], pieces: list[str], text: str, matched: str | None
) -> None:
    assert run(stops, pieces) == (text, matched)


def test_text_that_may_begin_a_stop_is_held_back() -> None:
    matcher = StopStrings(["stop"])
    assert matcher.push("go st") == "go "
    assert matcher.push("ay") == "stay"


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab", max_size=5), max_size=8),
)
def test_how_text_is_cut_does_not_matter(stops: list[str], pieces: list[str]) -> None:
    letter_by_letter = run(stops, list("".join(pieces)))
    assert run(stops, pieces) == letter_by_letter
    text, matched = letter_by_letter
    whole = "".join(pieces)
    assert whole.startswith(text + (matched or ""))
    if matched is None:
        assert text == whole
        assert not any(stop in whole for stop in stops)
