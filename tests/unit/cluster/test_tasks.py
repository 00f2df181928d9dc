"""Background tasks and their end."""

from __future__ import annotations

import asyncio

import pytest

from cluster.control import tasks as tasks_module
from cluster.control.tasks import Tasks


async def test_a_task_that_drops_a_cancel_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `asyncio.wait_for` does before Python 3.12 where its result is there and has not been read."""
    monkeypatch.setattr(tasks_module, "_CANCEL_AGAIN_S", 0.02)
    answers: list[asyncio.Future[None]] = []

    async def step() -> None:
        answers.append(asyncio.get_running_loop().create_future())
        await asyncio.wait_for(answers[-1], 60)

    tasks = Tasks()
    tasks.repeat(step, "step")
    await asyncio.sleep(0)
    answers[0].set_result(None)
    await asyncio.wait_for(tasks.close(), 20)
    assert all(answer.done() for answer in answers)


async def test_one_that_takes_its_time_to_end_is_waited_for() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.append("work")

    tasks = Tasks()
    tasks.start(work(), "work")
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.close(), 20)
    assert ended == ["work"]
