from __future__ import annotations

from collections import Counter

import pytest

from router.fleet.placement import DecodeView, PrefillView, choose_colocated, choose_prefill, rank_decode


def p(name: str, outstanding: int = 0, others: int = 0, last: int = 0) -> PrefillView:
    return PrefillView(name, outstanding, outstanding + others, last)


def d(name: str, free: int, busy: int = 0, last: int = 0) -> DecodeView:
    return DecodeView(name, free, busy, last)


@pytest.mark.parametrize(
    ("views", "num_tokens", "chosen"),
    [
        ([], 10, None),
        ([p("a", 50), p("b", 20)], 10, "b"),
        ([p("a", 0, others=70), p("b", 20)], 10, "b"),
        ([p("a", 95), p("b", 91)], 10, None),
        ([p("a", 95), p("b", 90)], 10, "b"),
        ([p("a", 1), p("b", 0)], 5000, "b"),
        ([p("a", 1), p("b", 2)], 5000, None),
        ([p("a", last=3), p("b", last=2)], 10, "b"),
    ],
)
def test_the_least_loaded_prefill_worker_within_its_backlog(
    views: list[PrefillView], num_tokens: int, chosen: str | None
) -> None:
    assert choose_prefill(views, num_tokens, backlog_limit=100) == chosen


def test_affinity_gives_way_to_the_backlog_and_to_a_worker_that_failed() -> None:
    views = [p("a", 90), p("b", 0)]
    assert choose_prefill(views, 5, 100, prefer="a") == "a"
    assert choose_prefill(views, 20, 100, prefer="a") == "b"
    assert choose_prefill(views, 5, 100, prefer="a", avoid={"a"}) == "b"
    assert choose_prefill([views[0]], 5, 100, avoid={"a"}) == "a"


@pytest.mark.parametrize(
    ("views", "ranked"),
    [
        ([], ()),
        ([d("a", 10), d("b", 20)], ("b", "a")),
        ([d("a", 10, busy=3), d("b", 10, busy=1)], ("b", "a")),
        ([d("a", 10, last=2), d("b", 10, last=1)], ("b", "a")),
    ],
)
def test_decode_workers_by_free_blocks_then_sequences(
    views: list[DecodeView], ranked: tuple[str, ...]
) -> None:
    assert rank_decode(views) == ranked


def test_decode_preference_and_avoidance() -> None:
    views = [d("a", 30), d("b", 20), d("c", 10)]
    assert rank_decode(views, prefer="c") == ("c", "a", "b")
    assert rank_decode(views, prefer="c", avoid={"a"}) == ("c", "b", "a")


def test_a_colocated_worker_by_queued_tokens_then_room() -> None:
    prefills = [p("a", 10), p("b", 10), p("c", 99)]
    decodes = [d("a", 5), d("b", 50), d("c", 500)]
    assert choose_colocated(prefills, decodes, 10, 100) == "b"
    assert choose_colocated([p("c", 99)], decodes, 10, 100) is None


def test_a_burst_spreads_where_every_choice_is_counted() -> None:
    out: Counter[str] = Counter()
    for turn in range(64):
        views = [p(name, out[name] * 100) for name in "abcd"]
        chosen = choose_prefill(views, 100, 10_000)
        assert chosen is not None, turn
        out[chosen] += 1
    assert max(out.values()) / (64 / 4) <= 1.5
