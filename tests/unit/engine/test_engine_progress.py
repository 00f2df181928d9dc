"""The counter that tells work from a stall: it moves while the engine works, and says when it need not."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.compiles import tell_compiles
from engine.loop import EngineLoop
from engine.progress import Progress
from tests.unit.engine.driving import drain, prompt, request

WAIT_S = 30


@pytest.mark.parametrize("compile", ["auto", "off"])
def test_the_counter_moves_with_every_layer_of_a_step(make_engine, compile):
    engine = make_engine(compile=compile)
    engine.add(request(prompt(10), max_tokens=3))
    before = engine.progress.read().count
    engine.step()
    assert engine.progress.read().count - before == engine.layout.num_layers
    drain(engine)
    assert engine.progress.read().count - before == 3 * engine.layout.num_layers


def test_the_thread_is_at_work_in_a_call_and_not_when_it_sleeps(engine):
    loop = EngineLoop(engine)
    loop.start()
    begun, go_on = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        begun.set()
        go_on.wait(WAIT_S)

    held = loop.call(hold)
    assert begun.wait(WAIT_S)
    during = engine.progress.read()
    assert during.is_working
    go_on.set()
    held.result(WAIT_S)
    loop.call(lambda _: None).result(WAIT_S)
    assert engine.progress.read().count > during.count
    loop.stop()
    assert not engine.progress.read().is_working


def test_a_steps_time_is_estimated_from_those_of_late():
    progress = Progress()
    assert progress.read().step_ms == 0
    progress.stepped(100.0)
    assert progress.read().step_ms == 100
    for _ in range(50):
        progress.stepped(10.0)
    assert progress.read().step_ms == pytest.approx(10, rel=0.01)


def test_compiling_is_told_and_is_over_when_all_of_it_is():
    progress = Progress()
    with progress.compiling():
        with progress.compiling():
            assert progress.read().is_compiling
        assert progress.read().is_compiling
    assert not progress.read().is_compiling


def test_torchs_compiler_is_seen_at_work():
    progress = Progress()
    seen: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        seen.append(progress.read().is_compiling)
        return graph.forward

    tell_compiles(progress)
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert seen == [True]
    assert not progress.read().is_compiling
