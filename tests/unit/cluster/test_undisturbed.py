from __future__ import annotations

import signal
import threading

import pytest

from cluster.undisturbed import undisturbed

INTERRUPTS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", INTERRUPTS)
def test_two_signals_are_answered_and_the_work_goes_on(number: signal.Signals) -> None:
    told: list[str] = []
    before = signal.getsignal(number)
    with undisturbed(told.append):
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert len(told) == 2
    assert "still ending" in told[0]
    assert "twice more" in told[0]
    assert "once more" in told[1]
    assert signal.getsignal(number) is before


def test_the_third_stops_it_and_the_handlers_are_as_before() -> None:
    told: list[str] = []
    before = [signal.getsignal(number) for number in INTERRUPTS]
    with pytest.raises(KeyboardInterrupt), undisturbed(told.append):  # noqa: PT012 - it raises in between
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        pytest.fail("it went on")
    assert len(told) == 2
    assert [signal.getsignal(number) for number in INTERRUPTS] == before


def test_on_another_thread_it_leaves_signals_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with undisturbed(lambda _: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
