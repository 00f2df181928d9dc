"""What strikes, and what is put right again when the request has ended."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

from observability.moments import Moment
from tests.faults.link import Link
from tests.faults.matrix.cells import Cell, Fault, Part, State
from tests.faults.matrix.rig import Place, Rig
from tests.faults.matrix.states import Scene
from worker.identity import Role

_SIGNALS = {
    Fault.SIGKILL: signal.SIGKILL,
    Fault.SIGTERM: signal.SIGTERM,
    Fault.SIGSTOP: signal.SIGSTOP,
}
_SLOW_BYTES_PER_S, _SLOW_DELAY_S = 400_000.0, 0.01
# A worker that drains ends by itself soon after its last sequence; a router after its `drain_s`.
_GO_S = 30.0
_ROLES = {Part.PREFILL: Role.PREFILL, Part.DECODE: Role.DECODE}
_MOMENTS = {Part.PREFILL: Moment.PREFILL_BEGIN, Part.DECODE: Moment.RESERVED}


def victim_of(rig: Rig, cell: Cell, scene: Scene) -> Place | None:
    """The worker that has part in the request; where it has none yet, in one that is before it."""
    if cell.part not in _ROLES:
        return None
    if scene.draining is not None:
        return scene.draining
    for answer in (scene.answer, *scene.others):
        name = rig.running.worker_of(answer.request_id, _MOMENTS[cell.part])
        if name is not None:
            return rig.named(name)
    return rig.of(_ROLES[cell.part])[0]


async def strike(rig: Rig, cell: Cell, scene: Scene, victim: Place | None) -> None:
    if cell.fault is Fault.CANCEL:
        scene.answer.cancel()
        return
    if (number := _SIGNALS.get(cell.fault)) is not None:
        process = victim.process.process if victim is not None else rig.running.process
        process.send_signal(number)
        return
    if cell.fault is Fault.CORRUPT:
        _corrupt(rig, cell, scene, victim)
        return
    for link in (*rig.links(cell.part, victim), *_pushes(rig, cell)):
        if cell.fault is Fault.CUT:
            link.cut()
        elif cell.fault is Fault.SLOW:
            link.slow(_SLOW_BYTES_PER_S, _SLOW_DELAY_S)
        else:
            await link.refuse()


def _corrupt(rig: Rig, cell: Cell, scene: Scene, victim: Place | None) -> None:
    """P: a bit of the next KV frame. D: its stream of tokens. Router: what its client reads."""
    if cell.part is Part.PREFILL:
        # To one decode worker only: KV that is damaged twice is given up.
        target = rig.running.worker_of(scene.answer.request_id, Moment.RESERVED)
        (rig.named(target) if target is not None else rig.of(Role.DECODE)[0]).push.damage()
    elif victim is not None:
        victim.link.garble()
    else:
        rig.front.garble()


def _pushes(rig: Rig, cell: Cell) -> list[Link]:
    """KV that a prefill worker sends goes by its receivers' links. Were they refused, nobody could push."""
    if cell.part is not Part.PREFILL or cell.fault is Fault.REFUSE:
        return []
    return [place.push for place in rig.of(Role.DECODE)]


async def put_right(rig: Rig, cell: Cell, scene: Scene, victim: Place | None) -> None:
    """Whoever was stopped goes on, links are whole, and those that are gone are replaced."""
    if cell.fault is Fault.SIGSTOP:
        process = victim.process.process if victim is not None else rig.running.process
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
    links = rig.links(cell.part, victim) if cell.part is not Part.CLIENT else []
    for link in (*links, *(place.push for place in rig.of(Role.DECODE))):
        await link.mend()
    if victim is not None and (cell.fault in (Fault.SIGKILL, Fault.SIGTERM) or scene.draining is victim):
        await asyncio.wait_for(victim.process.process.wait(), _GO_S)
        await rig.bury(victim)
    elif scene.draining is not None:
        await asyncio.wait_for(scene.draining.process.process.wait(), _GO_S)
        await rig.bury(scene.draining)
    if rig.router is not None and _ends_router(cell):
        await asyncio.wait_for(rig.running.process.wait(), _GO_S)
        await rig.bury_router()


def _ends_router(cell: Cell) -> bool:
    is_signalled = cell.fault in (Fault.SIGKILL, Fault.SIGTERM)
    return cell.part is Part.ROUTER and (is_signalled or cell.state is State.DRAINING)
