from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Queue

import pytest

from engine.engine import Engine
from engine.errors import CannotFit, EngineError
from engine.loop import EngineLoop
from engine.request import SequenceOutput, StepResult, Until
from tests.unit.engine.driving import prompt, request, tokens_of

WAIT_S = 30


class Listener:
    """Collects what each sequence gets; `last` yields ids of sequences as they end."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[SequenceOutput]] = {}
        self.last: Queue[str] = Queue()

    def __call__(self, result: StepResult) -> None:
        assert threading.current_thread().name == "engine"
        for output in result.outputs:
            self.outputs.setdefault(output.sequence_id, []).append(output)
            if output.is_last:
                self.last.put(output.sequence_id)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def loop(engine: Engine, listener: Listener) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, listener)
    loop.start()
    yield loop
    loop.stop()


def test_sequences_run_and_the_listener_hears_of_them(loop, listener, reference):
    items = [request(prompt(n)) for n in (3, 40)]
    for item in items:
        loop.call(lambda engine, item=item: engine.add(item)).result(WAIT_S)
    assert {listener.last.get(timeout=WAIT_S) for _ in items} == {item.sequence_id for item in items}
    for item in items:
        tokens = [token.token_id for token in tokens_of(listener.outputs[item.sequence_id])]
        assert tokens == reference("llama").generate(item.prompt_token_ids, 20)


def test_calls_run_in_order_on_the_engines_thread(loop):
    seen: list[int] = []
    futures = [loop.call(lambda _, n=n: seen.append(n)) for n in range(50)]
    for future in futures:
        future.result(WAIT_S)
    assert seen == list(range(50))
    assert loop.call(lambda _: threading.current_thread().name).result(WAIT_S) == "engine"


def test_what_a_call_raises_is_its_callers_and_the_loop_goes_on(loop):
    with pytest.raises(CannotFit):
        loop.call(lambda engine: engine.add(request(()))).result(WAIT_S)
    assert loop.call(lambda engine: engine.snapshot()).result(WAIT_S).num_waiting == 0
    assert loop.failure is None


def test_the_listener_can_be_replaced_while_the_engine_lives_on(loop, listener):
    other = Listener()
    loop.set_listener(other).result(WAIT_S)
    item = request(prompt(3))
    loop.call(lambda engine: engine.add(item)).result(WAIT_S)
    assert other.last.get(timeout=WAIT_S) == item.sequence_id
    assert not listener.outputs


def test_a_loop_that_can_run_nothing_sleeps_until_a_call(make_engine, listener):
    engine = make_engine(num_blocks=4)
    loop = EngineLoop(engine, listener)
    loop.start()
    held = request(prompt(60), 1, until=Until.FIRST_TOKEN, hold_blocks=True)
    waiting = request(prompt(60, 1), 1)
    loop.call(lambda engine: engine.add(held)).result(WAIT_S)
    loop.call(lambda engine: engine.add(waiting)).result(WAIT_S)
    assert listener.last.get(timeout=WAIT_S) == held.sequence_id
    loop.call(lambda engine: engine.release_hold(held.sequence_id)).result(WAIT_S)
    assert listener.last.get(timeout=WAIT_S) == waiting.sequence_id
    loop.stop()


def test_a_bug_ends_the_loop_and_everybody_hears_of_it(engine):
    failed: Queue[BaseException] = Queue()
    error = ZeroDivisionError("a bug")

    def broken_listener(_: StepResult) -> None:
        raise error

    loop = EngineLoop(engine, broken_listener, on_failure=failed.put)
    loop.start()
    item = request(prompt(3))
    loop.call(lambda engine: engine.add(item)).result(WAIT_S)
    assert failed.get(timeout=WAIT_S) is error
    assert loop.failure is error
    with pytest.raises(EngineError) as caught:
        loop.call(lambda engine: engine.snapshot()).result(WAIT_S)
    assert caught.value.__cause__ is error
    loop.stop()
    engine.cancel(item.sequence_id)


def test_stopping_fails_later_calls_and_can_be_repeated(loop):
    loop.stop()
    loop.stop()
    with pytest.raises(EngineError):
        loop.call(lambda engine: engine.snapshot()).result(WAIT_S)


def test_a_quiet_loop_checks_its_books(engine, monkeypatch):
    checked = threading.Event()
    monkeypatch.setattr(engine, "check_integrity", checked.set)
    loop = EngineLoop(engine)
    loop.start()
    assert checked.wait(WAIT_S)
    loop.stop()
