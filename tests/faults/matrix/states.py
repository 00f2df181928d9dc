"""Brings a request into a state and keeps it there: what it waits for is held back on a link.

Each way in returns when the request is there. What is held goes on by `rig.let_go()`.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from observability.moments import Moment
from tests.faults.matrix.answer import Answer
from tests.faults.matrix.cells import Part, State
from tests.faults.matrix.rig import Place, Rig
from tests.integration.router.harness import until
from tests.unit.engine.driving import prompt
from worker.identity import Role

# To get there: a backstop, since all of it takes well under a second on a machine of its own.
REACH_S = 40.0
LONG, MIDDLE, SHORT = 1900, 600, 120
_HELD_KV_BYTES = 100_000
NUM_DECODED = 12


@dataclass
class Scene:
    """The request that is struck, those that are there besides, and whom a blow at a part is for."""

    answer: Answer
    others: list[Answer] = field(default_factory=list)
    draining: Place | None = None


class Stage:
    """Asks for new prompts: none is in a cache."""

    def __init__(self, rig: Rig, number: int, part: Part, timeout_s: float) -> None:
        self.rig = rig
        self.part = part
        self._number = number
        self._timeout_s = timeout_s
        self._num_asked = 0

    def ask(self, length: int, max_tokens: int) -> Answer:
        self._num_asked += 1
        request_id = f"cell-{self._number}-{self._num_asked}"
        ids = prompt(length, seed=10 * self._number + self._num_asked)
        return Answer(self.rig.client, request_id, ids, max_tokens, self._timeout_s)

    async def told(self, answer: Answer, moment: Moment) -> str | None:
        return await self.rig.running.moment(answer.request_id, moment, REACH_S)


async def queued(stage: Stage) -> Scene:
    """Every prefill worker has a long prompt, and does not hear of it yet."""
    stage.rig.hold_prefills()
    others = [stage.ask(LONG, 6) for _ in stage.rig.of(Role.PREFILL)]
    for other in others:
        await stage.told(other, Moment.PREFILL_BEGIN)
    answer = stage.ask(MIDDLE, 40)
    await stage.told(answer, Moment.QUEUED)
    return Scene(answer, others)


async def reserved(stage: Stage) -> Scene:
    """It has blocks, and its prefill worker does not hear of it yet."""
    stage.rig.hold_prefills()
    answer = stage.ask(MIDDLE, 40)
    await stage.told(answer, Moment.PREFILL_BEGIN)
    return Scene(answer)


async def in_prefill(stage: Stage) -> Scene:
    """Some chunks are computed, no KV has come."""
    stage.rig.hold_pushes()
    answer = stage.ask(LONG, 40)
    await _is_computing(stage, answer)
    return Scene(answer)


async def in_transfer(stage: Stage) -> Scene:
    """Some KV has come, and not all of it."""
    stage.rig.hold_pushes(_HELD_KV_BYTES)
    answer = stage.ask(LONG, 40)
    decodes = stage.rig.of(Role.DECODE)
    await until(lambda: any(place.push.is_held for place in decodes), REACH_S)
    return Scene(answer)


async def at_token_0(stage: Stage) -> Scene:
    """The client has the first token, the decode worker has not all of the KV."""
    stage.rig.hold_pushes(_HELD_KV_BYTES // 2)
    answer = stage.ask(MIDDLE, 40)
    await answer.has(1, REACH_S)
    return Scene(answer)


async def mid_decode(stage: Stage) -> Scene:
    answer = stage.ask(SHORT, 600)
    await answer.has(NUM_DECODED, REACH_S)
    return Scene(answer)


async def draining(stage: Stage) -> Scene:
    """The part that will be struck has been told to finish what it has and to go."""
    rig = stage.rig
    if stage.part is Part.PREFILL:
        scene = await in_prefill(stage)
        scene.draining = rig.named(await stage.told(scene.answer, Moment.PREFILL_BEGIN) or "")
    else:
        scene = await mid_decode(stage)
        if stage.part is Part.ROUTER:
            rig.running.process.send_signal(signal.SIGTERM)
            return scene
        scene.draining = rig.named(await stage.told(scene.answer, Moment.RESERVED) or "")
    scene.draining.process.drain()
    await rig.show(scene.draining)
    return scene


WAYS_IN: dict[State, Callable[[Stage], Awaitable[Scene]]] = {
    State.QUEUED: queued,
    State.RESERVED: reserved,
    State.IN_PREFILL: in_prefill,
    State.IN_TRANSFER: in_transfer,
    State.AT_TOKEN_0: at_token_0,
    State.MID_DECODE: mid_decode,
    State.DRAINING: draining,
}


async def _is_computing(stage: Stage, answer: Answer) -> None:
    name = await stage.told(answer, Moment.PREFILL_BEGIN)
    process = stage.rig.named(name or "").process
    before = (await process.status()).counters.tokens_prefilled
    await process.until(lambda status: status.counters.tokens_prefilled > before, REACH_S)
