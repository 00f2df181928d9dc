from __future__ import annotations

import itertools

import pytest

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import (
    Aborted,
    DataLoss,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    PdserveError,
    ResourceExhausted,
    Unavailable,
)
from router.deadline import Deadline
from router.front.intake import seed_of
from router.loss import LEAVES, STALLED, AttemptLost, Verdict, back_off_s, judge
from router.request import MOVES, IllegalMove, Request, RequestState, SequencePlan, Timeline
from router.text.transcript import StopText, Transcript
from router.tokens import Token
from tests.unit.router.test_transcript import Letters

S = RequestState


def make_request(retry_budget: int = 3, num_prompt_tokens: int = 2) -> Request:
    plan = SequencePlan(
        "id",
        "transfer",
        0,
        tuple(range(1, num_prompt_tokens + 1)),
        generation_pb2.SamplingParams(),
        generation_pb2.StopConditions(),
        generation_pb2.OutputOptions(),
    )
    return Request(
        plan,
        Transcript(Letters(), StopText()),
        Timeline(0.0),
        Deadline(1.0),
        retry_budget,
        lambda event: None,
    )


@pytest.mark.parametrize(("begin", "end"), list(itertools.product(S, S)))
def test_only_the_drawn_moves_are_legal(begin: S, end: S) -> None:
    drawn = {
        S.RECEIVED: {S.QUEUED, S.DONE},
        S.QUEUED: {S.RESERVED, S.DONE},
        S.RESERVED: {S.PREFILLING, S.QUEUED, S.DONE},
        S.PREFILLING: {S.STREAMING, S.QUEUED, S.DONE},
        S.STREAMING: {S.QUEUED, S.DONE},
        S.DONE: set(),
    }
    assert {state: set(moves) for state, moves in MOVES.items()} == drawn
    request = make_request()
    request.state = begin
    if end in drawn[begin]:
        request.move(end)
        assert request.state is end
    else:
        with pytest.raises(IllegalMove):
            request.move(end)


def lose(request: Request, error: PdserveError, verdict: Verdict = Verdict.RETRY) -> None:
    request.state = S.PREFILLING
    request.lose(AttemptLost(error, verdict))


def test_losses_are_paid_from_the_budget_and_refusals_are_not() -> None:
    request = make_request(retry_budget=2)
    for _ in range(5):
        lose(request, ResourceExhausted("full"), Verdict.WAIT)
    lose(request, Unavailable("one"))
    lose(request, Unavailable("two"))
    assert request.state is S.QUEUED
    with pytest.raises(Unavailable, match="three"):
        lose(request, Unavailable("three"))


def test_a_stream_that_cannot_be_resumed_is_aborted() -> None:
    request = make_request(retry_budget=0)
    request.transcript.push([Token(0, 1)])
    with pytest.raises(Aborted, match="after 1 tokens"):
        lose(request, Unavailable("gone"))


def test_damaged_twice_is_data_loss() -> None:
    request = make_request()
    lose(request, DataLoss("digest"))
    with pytest.raises(DataLoss):
        lose(request, DataLoss("digest"))


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (Unavailable(""), Verdict.RETRY),
        (Aborted(""), Verdict.RETRY),
        (DataLoss(""), Verdict.RETRY),
        (FailedPrecondition("stale"), Verdict.RETRY),
        (FailedPrecondition("", reason="LAYOUT_MISMATCH"), Verdict.FINAL),
        (ResourceExhausted(""), Verdict.WAIT),
        *((Unavailable("", reason=reason), Verdict.MOVE) for reason in ("DRAINING", "STOPPING", "STOPPED")),
        *((Unavailable("", reason=reason), Verdict.MOVE) for reason in ("FAILED", STALLED, LEAVES)),
        (Internal(""), Verdict.FINAL),
        (InvalidArgument(""), Verdict.FINAL),
    ],
)
def test_what_a_workers_error_means(error: PdserveError, verdict: Verdict) -> None:
    assert judge(error) is verdict


def test_back_off_doubles_up_to_its_limit() -> None:
    for failures, top in ((1, 0.02), (2, 0.04), (3, 0.08), (50, 1.0), (100_000, 1.0)):
        waits = [back_off_s(failures) for _ in range(50)]
        assert top / 2 <= min(waits) <= max(waits) <= top


def test_seeds_of_n_sequences_differ_and_the_first_is_the_requests() -> None:
    seeds = [seed_of(7, index) for index in range(16)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seed_of(2**64 - 1, 3) == seed_of(2**64 - 1, 3)
