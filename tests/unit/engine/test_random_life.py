"""An engine under random use: whatever is added, cancelled, reserved, handed over, quarantined or held, the
books balance after every move, and what finishes has the tokens it would have had alone.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import engine.engine
from engine.engine import BlockReservation, Engine
from engine.errors import NoRoom
from engine.ngram import NgramProposer
from engine.request import NewToken, SequenceRequest, Until
from engine.sampling import SamplingParams
from engine.speculation import Speculator
from tests.unit.engine.driving import generate, prompt, request

NUM_MOVES = 250


class Life:
    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.requests: dict[str, SequenceRequest] = {}
        self.tokens: dict[str, list[NewToken]] = {}
        self.finished: list[str] = []
        self.holding: set[str] = set()
        self.reservations: list[BlockReservation] = []
        self.quarantined: list[BlockReservation] = []

    def make_request(self) -> SequenceRequest:
        length = self.random.choice([1, 5, 15, 16, 17, 32, 40, 64])
        made = request(
            prompt(length, self.random.randrange(3)),
            self.random.choice([1, 4, 20, 40]),
            sampling=SamplingParams(temperature=self.random.choice([0.0, 0.9]), seed=length),
            until=self.random.choice(list(Until)),
        )
        return replace(made, hold_blocks=made.until is Until.FIRST_TOKEN)

    def add(self) -> None:
        made = self.make_request()
        self.engine.add(made)
        self.requests[made.sequence_id] = made
        if made.hold_blocks:
            self.holding.add(made.sequence_id)

    def step(self) -> None:
        for output in self.engine.step().outputs:
            assert output.error is None
            self.tokens.setdefault(output.sequence_id, []).extend(output.new_tokens)
            if output.is_last:
                self.finished.append(output.sequence_id)

    def cancel(self) -> None:
        if self.requests:
            self.engine.cancel(self.random.choice(list(self.requests)))

    def release_hold(self) -> None:
        if self.holding:
            sequence_id = self.random.choice(sorted(self.holding))
            if self.engine.release_hold(sequence_id):
                self.holding.remove(sequence_id)

    def reserve(self) -> None:
        made = self.make_request()
        try:
            self.reservations.append(self.engine.reserve(made.prompt_token_ids, made.stop.max_tokens))
        except NoRoom:
            pass

    def end_reservation(self) -> None:
        if self.reservations:
            reservation = self.reservations.pop()
            if self.random.random() < 0.5:
                self.engine.quarantine(reservation)
                self.quarantined.append(reservation)
            else:
                self.engine.release_reservation(reservation)

    def free_quarantine(self) -> None:
        if self.quarantined:
            self.engine.release_reservation(self.quarantined.pop())

    def move(self) -> None:
        moves = [
            self.add,
            self.cancel,
            self.release_hold,
            self.reserve,
            self.end_reservation,
            self.free_quarantine,
        ]
        self.random.choices([*moves, self.step], weights=[4, 1, 3, 1, 2, 2, 12])[0]()

    def end(self) -> None:
        for reservation in (*self.reservations, *self.quarantined):
            self.engine.release_reservation(reservation)
        for sequence_id in self.holding:
            self.engine.release_hold(sequence_id)
        for _ in range(5000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("no end in sight")


@pytest.mark.parametrize("is_speculating", [False, True])
@pytest.mark.parametrize(("seed", "order"), [*((seed, "fcfs") for seed in range(4)), (4, "shortest")])
def test_random_use_leaks_nothing_and_changes_no_token(seed, order, is_speculating, make_engine, monkeypatch):
    settings: dict[str, object] = {"num_blocks": 24, "max_num_seqs": 6, "max_recompute_tokens": 16}
    settings["prefill_order"] = order
    if is_speculating:
        eager = Speculator(NgramProposer(1, 3), max_tokens=9, row_cost=1e-300)
        monkeypatch.setattr(engine.engine, "make_speculator", lambda _: eager)
        settings["speculative"] = {"method": "ngram"}
    life = Life(make_engine(**settings), seed)
    for _ in range(NUM_MOVES):
        life.move()
        life.engine.check_integrity()
    life.end()
    assert life.finished
    assert (life.engine.snapshot().draft_tokens > 50) == is_speculating
    monkeypatch.undo()
    alone = make_engine(num_blocks=64)
    for sequence_id in life.finished:
        made = life.requests[sequence_id]
        whole = replace(made, sequence_id=f"{sequence_id}/alone", hold_blocks=False)
        assert [[token.token_id for token in life.tokens[sequence_id]]] == generate(alone, whole)
