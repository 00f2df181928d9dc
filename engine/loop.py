"""The engine's thread: runs calls between steps, and steps while there is work. It sleeps when idle."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from engine.deep_stack import deep_stack
from engine.engine import Engine
from engine.errors import EngineError
from engine.request import StepResult

T = TypeVar("T")
Listener = Callable[[StepResult], None]
log = logging.getLogger(__name__)

# Quiet time before the books are checked, so that the check never stands before a request.
_IDLE_CHECK_S = 0.5


class _Call(Generic[T]):
    def __init__(self, fn: Callable[[Engine], T]) -> None:
        self.fn = fn
        self.future: Future[T] = Future()

    def run(self, engine: Engine) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.fn(engine)
        except BaseException as error:  # noqa: BLE001  # it travels to the caller in the future
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class EngineLoop:
    """Owns the thread on which everything of the engine happens.

    The listener gets every step's result on that thread and must not block. A sequence that breaks is
    told in its own output; only a bug in the engine or in the listener ends the loop: then `failure` is
    set, calls fail with it, and `on_failure` is called once, on this thread.
    """

    def __init__(
        self,
        engine: Engine,
        listener: Listener | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self.on_failure = on_failure
        self._listener = listener
        self._calls: deque[_Call[object]] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        with deep_stack():  # a grammar may be compiled again in a step
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step in progress; calls not yet run fail. Idempotent."""
        self._close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def call(self, fn: Callable[[Engine], T]) -> Future[T]:
        """Runs `fn(engine)` between steps, in the order of the calls. What it raises is the future's."""
        call = _Call(fn)
        with self._wake:
            if self._is_closed:
                call.future.set_exception(self._closed_error())
                return call.future
            self._calls.append(call)  # type: ignore[arg-type]  # the queue only runs it
            self._wake.notify()
        return call.future

    def set_listener(self, listener: Listener | None) -> Future[None]:
        """Takes effect between steps: the engine outlives the role that listens."""

        def replace(_: Engine) -> None:
            self._listener = listener

        return self.call(replace)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # nobody is above a thread: record it, report it, fail the callers
            log.exception("the engine's loop failed")
            self.failure = error
            self._close()
            if self.on_failure is not None:
                self.on_failure(error)
        finally:
            self.engine.progress.is_working = False

    def _work(self) -> None:
        is_stalled, progress = False, self.engine.progress
        while True:
            calls = self._next_calls(is_stalled)
            if calls is None:
                return
            for call in calls:
                call.run(self.engine)
                progress.moved()
            if not self.engine.has_work:
                is_stalled = False
                continue
            result = self.engine.step()
            progress.stepped(result.step_ms)
            # A step that ran nothing changed nothing: only a call can (a hold or a reservation given back).
            is_stalled = not result.outputs
            if result.outputs and self._listener is not None:
                self._listener(result)

    def _next_calls(self, is_stalled: bool) -> list[_Call[object]] | None:
        """The calls waiting now, after a sleep if there is nothing to do. None: the loop is closed."""
        is_checked = False
        progress = self.engine.progress
        with self._wake:
            while not self._is_closed and not self._calls and (is_stalled or not self.engine.has_work):
                progress.is_working = False
                if not self._wake.wait(None if is_checked else _IDLE_CHECK_S):
                    self.engine.check_integrity()
                    is_checked = True
            if self._is_closed:
                return None
            calls = list(self._calls)
            self._calls.clear()
            progress.is_working = True
            return calls

    def _close(self) -> None:
        with self._wake:
            self._is_closed = True
            left = list(self._calls)
            self._calls.clear()
            self._wake.notify_all()
        for call in left:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(self._closed_error())

    def _closed_error(self) -> EngineError:
        error = EngineError("the engine's loop is closed")
        error.__cause__ = self.failure
        return error
