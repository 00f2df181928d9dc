"""What a step tells on its way, and that it is true: layers told are final, in both kinds of stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from engine.engine import Engine
from engine.layer_watch import PromptEnd, layer_stops
from engine.request import Until
from tests.unit.engine.driving import prompt, request


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "stops"),
    [
        (30, 0, (0,)),
        (30, 1, (0,)),
        (30, 2, (0, 28)),
        (30, 3, (0, 15, 28)),
        (30, 6, (0, 6, 12, 18, 24, 28)),
        (30, 100, (0, 6, 12, 18, 24, 28)),
        (2, 2, (0, 1)),
        (2, 6, (0, 1)),
        (1, 6, (0,)),
    ],
)
def test_groups_are_even_with_a_thin_one_at_the_end(
    num_layers: int, num_groups: int, stops: tuple[int, ...]
) -> None:
    assert layer_stops(num_layers, num_groups) == stops


@pytest.fixture(params=["auto", "off"])
def engine(make_engine: Callable[..., Engine], request: pytest.FixtureRequest) -> Engine:
    return make_engine(compile=request.param)


def test_layers_that_were_told_are_final_and_the_others_are_not(engine: Engine) -> None:
    told: list[tuple[tuple[PromptEnd, ...], int]] = []
    early: list[torch.Tensor] = []

    def listen(ends: Sequence[PromptEnd], num_layers: int) -> None:
        told.append((tuple(ends), num_layers))
        (end,) = ends
        early.append(engine.pool.tensor[list(engine.block_table(end.sequence_id))].clone())

    engine.set_layer_listener(listen, min_group_bytes=1)
    item = request(prompt(100), 1, hold_blocks=True, until=Until.FIRST_TOKEN)
    engine.add(item)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert steps == 3
    end = PromptEnd(item.sequence_id, 96, 100)
    assert told == [((end,), stop) for stop in layer_stops(engine.layout.num_layers, 6)]
    final = engine.pool.tensor[list(engine.block_table(item.sequence_id))]
    for (_, num_layers), seen in zip(told, early, strict=True):
        assert torch.equal(seen[:6], final[:6])  # 96 tokens were there before
        assert torch.equal(seen[6, :num_layers, ..., :4, :], final[6, :num_layers, ..., :4, :])
        assert seen[6, num_layers:].isnan().all()
    engine.release_hold(item.sequence_id)


def test_nothing_is_told_of_steps_in_which_no_prompt_ends(engine: Engine) -> None:
    told: list[int] = []
    engine.set_layer_listener(lambda ends, _: told.append(len(ends)), min_group_bytes=1)
    engine.add(request(prompt(20), 5))
    engine.add(request(prompt(21), 5))
    engine.step()
    assert set(told) == {2}
    told.clear()
    while engine.has_work:
        engine.step()
    assert told == []


def test_each_prompt_is_told_as_often_as_its_size_is_worth(engine: Engine) -> None:
    told: dict[str, list[int]] = {}

    def listen(ends: Sequence[PromptEnd], num_layers: int) -> None:
        for end in ends:
            told.setdefault(end.sequence_id, []).append(num_layers)

    engine.set_layer_listener(listen, min_group_bytes=engine.layout.block_bytes)
    short, long = request(prompt(10), 1), request(prompt(35), 1)
    engine.add(short)
    engine.add(long)
    engine.step()
    assert told == {short.sequence_id: [0], long.sequence_id: [0, 1]}


def test_a_watched_step_draws_what_an_unwatched_one_draws(engine: Engine) -> None:
    answers: list[list[int]] = []
    for listener in (None, lambda ends, num_layers: None):
        engine.set_layer_listener(listener, min_group_bytes=1)
        engine.add(request(prompt(30), 8))
        tokens: list[int] = []
        while engine.has_work:
            tokens += [token.token_id for output in engine.step().outputs for token in output.new_tokens]
        answers.append(tokens)
    assert answers[0] == answers[1]
