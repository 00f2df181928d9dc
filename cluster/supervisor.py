"""Keeps every pool at its target: starts workers, watches them, drains them, replaces the dead.

`_live` is one worker's whole life. What is to be done is decided by `policy.plan_pool` whenever something
changed; nothing here waits for one worker before it decides about another.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine

from cluster.config import ClusterConfig, PoolConfig
from cluster.membership import SERVING, Member, Membership, WorkerState
from cluster.policy import FAILURES_UNTIL_UNRECOVERABLE, Plan, layout_difference, plan_pool, retry_delay_s
from cluster.probe import Probe
from cluster.worker_handle import Loading, Started, StartFailed, WorkerGone, WorkerHandle, WorkerSpec
from pdserve.v1.cluster_pb2 import WORKER_STATE_UNHEALTHY
from worker.identity import Role

log = logging.getLogger(__name__)

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 1.0
# A worker that answers no probe for so long is not chosen any more, and after the longer one is replaced.
UNHEALTHY_AFTER_S = 3.0
DEAD_AFTER_S = 30.0


class StartError(Exception):
    """A worker did not become ready; says why."""


class Supervisor:
    """`launch` makes a worker's process; Ray's in earnest, an in-process one in tests."""

    def __init__(
        self,
        config: ClusterConfig,
        membership: Membership,
        launch: Callable[[WorkerSpec], WorkerHandle],
        log_folder: str | None = None,
    ) -> None:
        self._config = config
        self._membership = membership
        self._launch = launch
        self._log_folder = log_folder
        self._handles: dict[str, WorkerHandle] = {}
        self._probes: dict[str, Probe] = {}
        self._last_answer: dict[str, float] = {}
        self._retry_at: dict[Role, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()

    def start(self) -> None:
        self._spawn(self._reconcile_when_woken(), "reconcile")
        self._spawn(self._probe_regularly(), "probe")
        self.wake()

    def wake(self) -> None:
        """Something changed: look whether there is something to do."""
        self._wake.set()

    def reconcile(self) -> None:
        """Begin what brings every pool to its target."""
        self._wake.clear()
        for pool in self._membership.pools.values():
            self._carry_out(plan_pool(pool), pool.role)

    async def close(self) -> None:
        """Ends every worker, at once, and all that happens here."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drain(self, member: Member, timeout_s: float | None) -> None:
        """Raises IllegalMove where the worker is in no state to drain."""
        self._membership.move(member, WorkerState.DRAINING, "finishes what it has")
        self._spawn(self._stop(member, timeout_s), f"drain {member.worker_id}")

    async def refresh(self, timeout_s: float) -> None:
        """Fresh reports of every worker that answers in time."""
        serving = [member for member in self._membership.members() if member.key in self._probes]
        await asyncio.gather(*(self._ask(member, timeout_s) for member in serving))

    async def _reconcile_when_woken(self) -> None:
        while True:
            await self._wake.wait()
            self.reconcile()

    def _carry_out(self, plan: Plan, role: Role) -> None:
        for member in plan.forget:
            self._membership.remove(member)
        for member in plan.give_up:
            self._membership.move(member, WorkerState.DEAD, "not needed any more")
            self._handles[member.key].kill()
        for member in plan.drain:
            self.drain(member, None)
        if not plan.start:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._retry_at.get(role, 0.0) - loop.time()
        if wait_s > 0:
            loop.call_later(wait_s, self.wake)
            return
        for worker_id in plan.start:
            self._begin(worker_id, role)

    def _begin(self, worker_id: str, role: Role) -> None:
        pool = self._config.pools.by_role()[role]
        member = Member(
            worker_id, role, uuid.uuid4().hex[:8], detail=f"waits for Ray to place it: {wanted(pool)}"
        )
        spec = WorkerSpec(
            cluster=self._config.name,
            worker_id=worker_id,
            key=member.key,
            role=role,
            model=self._config.model,
            pool=pool,
            kv_transfer=self._config.kv_transfer,
            log_folder=self._log_folder,
        )
        handle = self._handles[member.key] = self._launch(spec)
        self._membership.add(member)
        self._spawn(self._live(member, handle, pool.start_timeout_s), worker_id)

    async def _live(self, member: Member, handle: WorkerHandle, start_timeout_s: float) -> None:
        try:
            await self._become_ready(member, handle, start_timeout_s)
            await handle.wait_stopped()
            self._membership.move(member, WorkerState.STOPPED)
            self._membership.remove(member)
        except (StartError, WorkerGone) as error:
            self._died(member, str(error))
        except Exception as error:  # a bug here: shown in its state, raised to the log
            self._died(member, f"the controller broke: {type(error).__name__}: {error}")
            raise
        finally:
            handle.kill()
            del self._handles[member.key]
            probe = self._probes.pop(member.key, None)
            if probe is not None:
                await probe.close()
            self.wake()

    async def _become_ready(self, member: Member, handle: WorkerHandle, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._start(member, handle), timeout_s)
        except asyncio.TimeoutError as error:
            raise StartError(f"not ready within {timeout_s:.0f} s: {member.detail}") from error
        self._last_answer[member.key] = asyncio.get_running_loop().time()
        self._membership.start_succeeded(member.role)
        self._membership.move(member, WorkerState.READY)
        log.info("worker=%s ready address=%s pid=%s", member.worker_id, member.address, member.pid)

    async def _start(self, member: Member, handle: WorkerHandle) -> None:
        async for event in handle.start():
            if isinstance(event, Loading):
                member.pid = event.pid
                self._membership.describe(member, event.detail)
            elif isinstance(event, StartFailed):
                raise StartError(event.reason)
            elif isinstance(event, Started):
                await self._register(member, event.address)
                return
        raise StartError("its start ended without a result")

    async def _register(self, member: Member, address: str) -> None:
        """Takes it in, unless it could not hand KV to those that are there."""
        probe = self._probes[member.key] = Probe(address)
        report = await probe.describe(PROBE_TIMEOUT_S * 10)
        if report is None:
            raise StartError(f"it says that it serves {address}, and does not answer there")
        others = [
            (other.worker_id, other.report.limits.layout)
            for other in self._membership.members()
            if other.state in SERVING and other.report is not None
        ]
        difference = layout_difference(report.limits.layout, others)
        if difference is not None:
            raise StartError(difference)
        member.address, member.report, member.pid = address, report, report.pid

    def _died(self, member: Member, reason: str) -> None:
        log.warning("worker=%s %s → dead: %s", member.worker_id, member.state.value, reason)
        if member.state is WorkerState.DEAD:
            return  # it was given up
        was_starting = member.state is WorkerState.STARTING
        self._membership.move(member, WorkerState.DEAD, reason)
        if was_starting:
            num_failures = self._membership.pools[member.role].num_failures + 1
            is_hopeless = num_failures >= FAILURES_UNTIL_UNRECOVERABLE
            self._membership.start_failed(member.role, reason if is_hopeless else "")
            delay_s = retry_delay_s(num_failures)
            self._retry_at[member.role] = asyncio.get_running_loop().time() + delay_s

    async def _stop(self, member: Member, drain_timeout_s: float | None) -> None:
        try:
            await self._handles[member.key].stop(drain_timeout_s)
        except WorkerGone:
            pass  # `_live` sees the same, and says so

    async def _probe_regularly(self) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            await self.refresh(PROBE_TIMEOUT_S)
            now = asyncio.get_running_loop().time()
            for member in tuple(self._membership.members()):
                if member.state in SERVING and member.key in self._handles:
                    self._judge(member, now - self._last_answer[member.key])

    async def _ask(self, member: Member, timeout_s: float) -> None:
        report = await self._probes[member.key].describe(timeout_s)
        if report is not None:
            member.report = report
            self._last_answer[member.key] = asyncio.get_running_loop().time()

    def _judge(self, member: Member, silent_s: float) -> None:
        """READY ⇄ UNHEALTHY by its answers; the end of one that stays silent or says that it is broken."""
        is_broken = member.report is not None and member.report.state == WORKER_STATE_UNHEALTHY
        if silent_s > DEAD_AFTER_S or (is_broken and member.state is not WorkerState.DRAINING):
            reason = member.report.detail if is_broken and member.report else f"silent for {silent_s:.0f} s"
            self._died(member, reason)
            self._handles[member.key].kill()
        elif silent_s > UNHEALTHY_AFTER_S and member.state is WorkerState.READY:
            self._membership.move(member, WorkerState.UNHEALTHY, f"no answer for {silent_s:.0f} s")
        elif silent_s < UNHEALTHY_AFTER_S and member.state is WorkerState.UNHEALTHY:
            self._membership.move(member, WorkerState.READY)

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task %s broke", task.get_name(), exc_info=task.exception())


def wanted(pool: PoolConfig) -> str:
    """What a worker of the pool asks of Ray."""
    asked = {
        "num_cpus": pool.resources.num_cpus,
        "num_gpus": pool.resources.num_gpus,
        **pool.resources.custom,
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in asked.items() if amount)
