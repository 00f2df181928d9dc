"""Keeps every pool at its target: starts workers, watches them, drains them, replaces the dead.

`_live` is one worker's whole life. What is to be done is decided by `policy.plan_pool` whenever something
changed; nothing here waits for one worker before it decides about another.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Mapping

from cluster.config import ClusterConfig
from cluster.control.health import Patience, Verdict, judge, stuck_senders
from cluster.control.membership import SERVING, IllegalMove, Member, Membership, WorkerState
from cluster.control.policy import FAILURES_UNTIL_UNRECOVERABLE, Plan, plan_pool, retry_delay_s
from cluster.control.running import Running
from cluster.control.start import Start, StartError
from cluster.control.tasks import Tasks
from cluster.control.worker_handle import WorkerGone, WorkerHandle, WorkerSpec
from cluster.nodes.network import Bind
from pdserve.v1.cluster_pb2 import WORKER_STATE_DRAINING, WORKER_STATE_UNHEALTHY
from router.fleet.vigil import Vigil
from trust.trust import Trust
from worker.identity import Role

log = logging.getLogger(__name__)


Launch = Callable[[WorkerSpec], WorkerHandle]
_LEAVING = "goes when another is ready in its place"
_FINISHES = "finishes what it has"
_GOES_FIRST = f"{_FINISHES}, before another starts in its place: there is no room for both"


class Supervisor:
    """`launch` makes a worker's process; Ray's in earnest, a scripted one in tests."""

    def __init__(
        self,
        config: ClusterConfig,
        membership: Membership,
        launch: Launch,
        trust: Trust,
        log_folder: str | None = None,
        patience: Patience | None = None,
        bind: Bind = Bind.LOOPBACK,
    ) -> None:
        self._config = config
        self._membership = membership
        self._launch = launch
        self._trust = trust
        self._log_folder = log_folder
        self._patience = patience or Patience(unhealthy_after_s=config.router.suspect_after_s)
        self._bind = bind
        self._running: dict[str, Running] = {}  # by the member's key
        self._retry_at: dict[Role, float] = {}
        self._tasks = Tasks()
        self._wake = asyncio.Event()
        self._looked_at: float | None = None  # the loop's clock

    # -- from outside ------------------------------------------------------------------------------

    async def adopt(self, found: Mapping[str, Launch], patience_s: float) -> None:
        """Takes in the workers that an earlier controller has left, before `start`. By WORKER_ID/KEY.

        Returns when each has said how it is. One that does not within `patience_s` stays in the books as one
        that starts, and has a start's time to answer.
        """
        new = {what: launch for what, launch in found.items() if what.partition("/")[2] not in self._running}
        taken_in = [self._take_in(what, launch) for what, launch in sorted(new.items())]
        if taken_in:
            log.info("adopting %s", ", ".join(sorted(new)))
            waits = [asyncio.ensure_future(running.has_spoken.wait()) for running in taken_in]
            _, silent = await asyncio.wait(waits, timeout=patience_s)
            for wait in silent:
                wait.cancel()

    def _take_in(self, what: str, launch: Launch) -> Running:
        worker_id, _, key = what.partition("/")
        member = Member(worker_id, Role(worker_id.rpartition("-")[0]), key, detail="was found running")
        return self._watch_over(member, launch, is_adopted=True)

    def start(self) -> None:
        self._tasks.repeat(self._reconcile_when_woken, "reconcile")
        self._tasks.repeat(self._probe_all, "probe")
        self._wake.set()

    def reconcile(self) -> None:
        """Begin what brings every pool to its target."""
        self._wake.clear()
        for pool in self._membership.pools.values():
            self._carry_out(plan_pool(pool), pool.role)

    def drain(self, member: Member, timeout_s: float | None, detail: str = _FINISHES) -> None:
        """Raises IllegalMove where the worker is in no state to drain."""
        self._membership.move(member, WorkerState.DRAINING, detail)
        self._tasks.start(self._stop(member, timeout_s), f"drain {member.worker_id}")

    def replace(self, member: Member, drain_timeout_s: float | None) -> None:
        """Another one starts, and this one drains when it is ready. Raises IllegalMove as `drain` does."""
        if not member.can_drain:
            raise IllegalMove(f"{member.worker_id} is {member.state.value}")
        member.is_leaving, member.drain_timeout_s = True, drain_timeout_s
        self._membership.describe(member, _LEAVING)

    async def refresh(self, timeout_s: float) -> None:
        """Fresh reports of every worker that answers in time."""
        await asyncio.gather(*(running.ask(timeout_s) for running in self._running.values()))

    async def close(self) -> None:
        """Ends every worker, at once, and all that happens here."""
        await self._tasks.close()

    # -- what is to be done ------------------------------------------------------------------------

    async def _reconcile_when_woken(self) -> None:
        await self._wake.wait()
        self.reconcile()

    def _carry_out(self, plan: Plan, role: Role) -> None:
        for member in plan.forget:
            self._membership.remove(member)
        for member in plan.give_up:
            self._membership.move(member, WorkerState.DEAD, "not needed any more")
            self._membership.remove(member)
            self._running[member.key].handle.kill()
        has_no_room = any(member.finds_no_room for member in self._membership.pools[role].members)
        for member in plan.drain:
            detail = _GOES_FIRST if member.is_leaving and has_no_room else _FINISHES
            self.drain(member, member.drain_timeout_s, detail)
        if not plan.start:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._retry_at.get(role, 0.0) - loop.time()
        if wait_s > 0 and self._membership.pools[role].num_failures > 0:
            loop.call_later(wait_s, self._wake.set)
            return
        for worker_id in plan.start:
            self._begin(worker_id, role)

    def _begin(self, worker_id: str, role: Role) -> None:
        self._watch_over(Member(worker_id, role, uuid.uuid4().hex[:8]), self._launch)

    def _watch_over(self, member: Member, launch: Launch, is_adopted: bool = False) -> Running:
        """From now on it is in the books, and `_live` leads its life."""
        pool = self._config.pools.by_role()[member.role]
        spec = WorkerSpec(
            cluster=self._config.name,
            worker_id=member.worker_id,
            key=member.key,
            role=member.role,
            model=self._config.model,
            pool=pool,
            kv_transfer=self._config.kv_transfer,
            bind=self._bind,
            observability=self._config.observability,
            log_folder=self._log_folder,
        )
        member.detail = member.detail or f"waits to be placed: wants {spec.wanted()}"
        vigil = Vigil(self._patience.longest_look_s)
        running = self._running[member.key] = Running(member, launch(spec), vigil, is_adopted)
        self._membership.add(member)
        self._tasks.start(self._live(running, pool.start_timeout_s), member.worker_id)
        return running

    # -- one worker's life -------------------------------------------------------------------------

    async def _live(self, running: Running, start_timeout_s: float) -> None:
        member = running.member
        try:
            await self._become_ready(running, start_timeout_s)
            running.has_spoken.set()
            await running.handle.wait_stopped()
            self._membership.move(member, WorkerState.STOPPED)
            self._membership.remove(member)
        except (StartError, WorkerGone) as error:
            self._died(member, str(error))
        except Exception as error:  # a bug here: shown in its state, raised to the log
            self._died(member, f"the controller broke: {type(error).__name__}: {error}")
            raise
        finally:
            del self._running[member.key]
            await running.close()
            self._wake.set()

    async def _become_ready(self, running: Running, timeout_s: float) -> None:
        member = running.member
        patience_s = self._patience.register_timeout_s
        await Start(running, self._membership, self._trust, patience_s, self._wake.set).done(timeout_s)
        self._membership.start_succeeded(member.role)
        self._membership.move(member, WorkerState.READY)
        self._wake.set()
        log.info("worker=%s ready address=%s pid=%s", member.worker_id, member.address, member.pid)
        if member.report is not None and member.report.state == WORKER_STATE_DRAINING:
            self.drain(member, None)  # an earlier controller has told it to, and for how long

    def _died(self, member: Member, reason: str) -> None:
        log.warning("worker=%s %s → dead: %s", member.worker_id, member.state.value, reason)
        if member.state is WorkerState.DEAD:
            return  # it was given up, or killed for its silence
        # What was there before says nothing of how the next start will go.
        was_starting = member.state is WorkerState.STARTING and not self._running[member.key].is_adopted
        self._membership.move(member, WorkerState.DEAD, reason)
        if was_starting:
            num_failures = self._membership.pools[member.role].num_failures + 1
            is_hopeless = num_failures >= FAILURES_UNTIL_UNRECOVERABLE
            self._membership.start_failed(member.role, reason if is_hopeless else "")
            delay_s = retry_delay_s(num_failures)
            self._retry_at[member.role] = asyncio.get_running_loop().time() + delay_s

    async def _stop(self, member: Member, drain_timeout_s: float | None) -> None:
        try:
            await self._running[member.key].handle.stop(drain_timeout_s)
        except WorkerGone:
            pass  # `_live` sees the same, and says so

    # -- how they are ------------------------------------------------------------------------------

    async def _probe_all(self) -> None:
        await asyncio.sleep(self._patience.probe_every_s)
        now = asyncio.get_running_loop().time()
        elapsed_s, self._looked_at = now - (self._looked_at or now), now
        for running in self._running.values():
            running.vigil.passed(elapsed_s)
        await self.refresh(self._patience.probe_timeout_s)
        for running in tuple(self._running.values()):
            if running.member.state in SERVING:
                self._act_on(running)
        for key, why in stuck_senders(self._membership.members(), self._patience).items():
            self._died(self._running[key].member, why)
            self._running[key].handle.kill()

    def _act_on(self, running: Running) -> None:
        member, report, vigil = running.member, running.member.report, running.vigil
        is_broken = report is not None and report.state == WORKER_STATE_UNHEALTHY
        is_here = member.node == socket.gethostname()
        verdict = judge(member.state, vigil, self._patience, is_broken=is_broken, is_here=is_here)
        if verdict is Verdict.READY:
            self._membership.move(member, WorkerState.READY)
        elif verdict is Verdict.UNHEALTHY:
            self._membership.move(member, WorkerState.UNHEALTHY, vigil.complaint())
        elif verdict is Verdict.DEAD:
            self._died(member, report.detail if report is not None and is_broken else vigil.complaint())
            running.handle.kill()
        elif member.state is WorkerState.READY:
            usual = _LEAVING if member.is_leaving else ""
            self._membership.describe(member, "compiles" if vigil.is_compiling else usual)
