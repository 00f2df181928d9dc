"""When a worker that shows no sign of life is no longer chosen, and when it is replaced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from cluster.control.membership import SERVING, Member, WorkerState
from router.fleet.vigil import Vigil


@dataclass(frozen=True, slots=True)
class Patience:
    """How often workers are asked how they are, and how long one without a sign of life is borne."""

    probe_every_s: float = 1.0
    probe_timeout_s: float = 1.0
    # Not chosen any more …
    unhealthy_after_s: float = 5.0
    # … and replaced: a process on this machine that does not run after this, whatever it was about (on
    # another one it may be the network that is silent, which is borne as long as a slow step), …
    dead_after_silent_s: float = 6.0
    # … one that runs and computes nothing after the time of so many of its steps, and no sooner than this.
    dead_after_steps: float = 10.0
    dead_after_s: float = 15.0
    # Blocks of transfers that ended and that a worker might still write; then it is replaced.
    quarantine_s: float = 30.0
    # For the first answer of a worker that says that it serves.
    register_timeout_s: float = 10.0

    @property
    def longest_look_s(self) -> float:
        """More between two rounds of questions is the asker's own absence."""
        return 2 * (self.probe_every_s + self.probe_timeout_s)

    def has_run_out(self, vigil: Vigil, *, is_here: bool) -> bool:
        """Never of one that may still be chosen, however long that is."""
        in_a_step_s = max(self.dead_after_s, self.dead_after_steps * vigil.step_s, self.unhealthy_after_s)
        silent_s = max(self.dead_after_silent_s if is_here else self.dead_after_s, self.unhealthy_after_s)
        return vigil.still_s > in_a_step_s or vigil.silent_s > silent_s


class Verdict(Enum):
    AS_BEFORE = auto()
    UNHEALTHY = auto()
    READY = auto()
    DEAD = auto()


def stuck_senders(members: Iterable[Member], patience: Patience) -> dict[str, str]:
    """By their keys, the workers that others wait for in vain to write no more; and who does."""
    members = tuple(members)
    found: dict[str, str] = {}
    for waiting in members:
        for each in waiting.report.quarantines if waiting.report is not None else ():
            if each.age_ms > patience.quarantine_s * 1000:
                told = f"{each.num_blocks} blocks of {waiting.worker_id} wait for it to write no more"
                found |= {m.key: told for m in members if _is_process(m, waiting.node, each.sender_pid)}
    return found


def _is_process(member: Member, node: str, pid: int) -> bool:
    return member.state in SERVING and (member.node, member.pid) == (node, pid)


def judge(
    state: WorkerState, vigil: Vigil, patience: Patience, *, is_broken: bool = False, is_here: bool = True
) -> Verdict:
    """`is_broken`: it says itself that its engine is gone. A draining one may still finish what it can.
    `is_here`: on this machine.
    """
    if patience.has_run_out(vigil, is_here=is_here) or (is_broken and state is not WorkerState.DRAINING):
        return Verdict.DEAD
    is_still = vigil.still_s > patience.unhealthy_after_s
    if is_still and state is WorkerState.READY:
        return Verdict.UNHEALTHY
    if not is_still and state is WorkerState.UNHEALTHY:
        return Verdict.READY
    return Verdict.AS_BEFORE
