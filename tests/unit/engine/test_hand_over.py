"""KV computed by one engine and continued by another, block by block: equal to one engine doing both."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import CannotFit, NoRoom
from engine.request import NewToken
from engine.sampling import PositionLogprobs, SamplingParams, TokenLogprob
from tests.unit.engine.driving import drain, generate, hand_over, preempt, prompt, request, reserve, tokens_of

BLOCK = 16
DRAWING = SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.1)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 70])
@pytest.mark.parametrize("sampling", [SamplingParams(), DRAWING], ids=["greedy", "seeded"])
def test_two_engines_give_what_one_gives_cold_and_warm(length, sampling, make_engine):
    source, target, both = make_engine(), make_engine(), make_engine()
    ids = prompt(length)
    (expected,) = generate(both, request(ids, sampling=sampling))
    for num_cached in (0, length // BLOCK):
        item = request(ids, sampling=sampling)
        first, reservation = hand_over(source, target, item)
        assert reservation.num_cached_blocks == num_cached
        rest = tokens_of(drain(target)[item.sequence_id])
        assert [token.position for token in rest] == list(range(1, 20))
        assert [first.token_id, *(token.token_id for token in rest)] == expected


def test_a_resumed_sequence_is_handed_over_like_any_other(make_engine):
    source, target, both = make_engine(), make_engine(), make_engine()
    (expected,) = generate(both, request(prompt(21), sampling=DRAWING))
    item = request(prompt(21), known=expected[:9], sampling=DRAWING)
    first, _ = hand_over(source, target, item)
    assert (first.position, first.token_id) == (9, expected[9])
    assert [t.token_id for t in tokens_of(drain(target)[item.sequence_id])] == expected[10:]


def test_a_handed_over_sequence_survives_preemption(make_engine):
    source, target, both = make_engine(), make_engine(num_blocks=11), make_engine()
    items = [request(prompt(30, seed), 50, sampling=DRAWING) for seed in range(3)]
    expected = [generate(both, replace(item, sequence_id=f"{item.sequence_id}/b"))[0] for item in items]
    firsts = [hand_over(source, target, item)[0] for item in items]
    outputs = drain(target)
    assert target.snapshot().num_preemptions > 0
    for item, first, whole in zip(items, firsts, expected, strict=True):
        assert [first.token_id, *(t.token_id for t in tokens_of(outputs[item.sequence_id]))] == whole


def test_blocks_that_are_given_out_hold_no_number_until_they_are_written(make_engine):
    """In tests: it is by this that KV shows which was read or shipped before it was computed."""
    engine = make_engine(num_blocks=8)
    generate(engine, request(prompt(7 * BLOCK), 10))  # all blocks have been written, and are free or cached
    reservation = engine.reserve(prompt(3 * BLOCK, 1), 5)
    assert reservation.num_cached_blocks == 0
    assert engine.pool.tensor[list(reservation.block_ids)].isnan().all()
    engine.release_reservation(reservation)


def test_reserved_blocks_are_no_hit_until_their_kv_is_there(engine):
    item = request(prompt(3 * BLOCK))
    first = reserve(engine, item)
    second = reserve(engine, item)
    assert second.num_cached_blocks == 0
    assert not set(first.block_ids) & set(second.block_ids)
    engine.check_integrity()
    for reservation in (first, second):
        engine.release_reservation(reservation)
        engine.release_reservation(reservation)


def test_a_reservation_is_used_once(make_engine):
    source, target = make_engine(), make_engine()
    item = request(prompt(20))
    first, reservation = hand_over(source, target, item)
    with pytest.raises(ValueError, match="gone"):
        target.add_computed(replace(item, sequence_id="again"), reservation, first)
    target.release_reservation(reservation)
    target.quarantine(reservation)
    assert target.snapshot().blocks_used == 2
    drain(target)


def test_what_does_not_belong_together_changes_nothing(engine):
    item = request(prompt(20), 5)
    reservation = reserve(engine, item)
    for wrong, first in (
        (item, NewToken(1, 3, None)),
        (request(prompt(21), 5), NewToken(0, 3, None)),
        (replace(item, stop=replace(item.stop, stop_token_ids=frozenset({3}))), NewToken(0, 3, None)),
    ):
        with pytest.raises(ValueError, match=wrong.sequence_id):
            engine.add_computed(wrong, reservation, first)
    assert engine.snapshot().num_reservations == 1
    assert not engine.has_work
    engine.release_reservation(reservation)


@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("token_id", [512, 2**24, 2**32 - 1, -1])
def test_a_first_token_outside_the_vocabulary_is_refused_and_neighbours_go_on(token_id, compile, make_engine):
    engine = make_engine(compile=compile)
    neighbour, item = request(prompt(9), 4), request(prompt(20), 5)
    engine.add(neighbour)
    reservation = reserve(engine, item)
    far = TokenLogprob(token_id, -1.0)
    for first in (
        NewToken(0, token_id, None),
        NewToken(0, 3, PositionLogprobs(TokenLogprob(3, -0.5), (far,))),
    ):
        with pytest.raises(ValueError, match=r"outside the vocabulary"):
            engine.add_computed(item, reservation, first)
    assert engine.snapshot().num_reservations == 1
    assert len(tokens_of(drain(engine)[neighbour.sequence_id])) == 4
    engine.release_reservation(reservation)


@pytest.mark.parametrize("token_id", [512, 2**32 - 1, -1])
def test_prompts_and_known_tokens_outside_the_vocabulary_are_refused(token_id, engine):
    for ids, known in (((5, token_id), ()), ((5,), (7, token_id))):
        with pytest.raises(CannotFit, match="outside the vocabulary"):
            engine.add(request(ids, 8, known=known))
        with pytest.raises(CannotFit, match="outside the vocabulary"):
            engine.reserve((*ids, *known), 8)
    assert not engine.has_work


def test_a_quarantine_gives_back_what_nobody_writes_and_keeps_the_rest(engine):
    generate(engine, request(prompt(2 * BLOCK), 2))
    reservation = engine.reserve((*prompt(2 * BLOCK), *prompt(20)), 5)
    assert reservation.num_cached_blocks == 2
    engine.quarantine(reservation)
    engine.quarantine(reservation)
    load = engine.snapshot()
    assert (load.blocks_used, load.blocks_quarantined, load.num_reservations) == (2, 2, 0)
    engine.check_integrity()
    with pytest.raises(NoRoom):
        engine.reserve(prompt(63 * BLOCK), 1)
    engine.release_reservation(reservation)
    assert engine.snapshot().blocks_quarantined == 0


def test_room_is_kept_for_the_growth_of_what_was_promised(make_engine):
    engine = make_engine(num_blocks=8)
    reservations = [engine.reserve(prompt(BLOCK, n), 30) for n in range(4)]
    with pytest.raises(NoRoom):
        engine.reserve(prompt(BLOCK, 9), 30)
    for reservation in reservations:
        engine.release_reservation(reservation)


def test_running_places_are_promised_only_once(make_engine):
    engine = make_engine(max_num_seqs=2)
    reservations = [engine.reserve(prompt(3), 5) for _ in range(2)]
    with pytest.raises(NoRoom, match="places"):
        engine.reserve(prompt(3), 5)
    waiting = request(prompt(3))
    engine.add(waiting)
    assert not engine.step().outputs
    engine.release_reservation(reservations[0])
    assert engine.step().outputs
    engine.release_reservation(reservations[1])
    drain(engine)


def test_a_preempted_sequence_goes_before_new_reservations(make_engine):
    engine = make_engine(num_blocks=8)
    preempt(engine)
    with pytest.raises(NoRoom, match="preempted"):
        engine.reserve(prompt(1), 1)
    drain(engine)


def test_what_can_never_fit_gets_no_reservation(make_engine):
    engine = make_engine(num_blocks=4)
    with pytest.raises(CannotFit):
        engine.reserve(prompt(60), 5)
    with pytest.raises(CannotFit):
        engine.reserve(prompt(60), 0)


_PRINT_NAMES = """
from engine.prefix import extend_hashes, root_hash
hashes = []
extend_hashes(hashes, root_hash("model"), list(range(64)), 16, 4)
print(*(name.hex() for name in hashes))
"""


def test_block_names_do_not_depend_on_the_process():
    root = Path(__file__).parents[3]

    def names(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", _PRINT_NAMES],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return run.stdout

    assert names("1") == names("2")
