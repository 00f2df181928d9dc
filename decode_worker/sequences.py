"""What a decode worker has let in, from its Reserve to its last token: who holds what, and who is told.

The asyncio loop owns all tables of this file; the engine's thread and the KV threads only post to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from decode_worker.admission import Admission, Admissions, Mode, Released
from decode_worker.config import DecodeConfig
from decode_worker.intake import Intake
from decode_worker.publisher import Publisher
from decode_worker.record import DecodeRecord
from decode_worker.step_output import step_batches
from decode_worker.subscription import StepBatch, StepToken, Subscription
from engine.engine import Engine
from engine.errors import EngineError
from engine.loop import EngineLoop
from engine.request import EngineLoad, NewToken, SequenceRequest, StepResult
from kv_transfer.frame import TransferKey
from kv_transfer.handover import HandOver, HandOvers
from kv_transfer.reservation import Reservation
from kv_transfer.transfer import PushTarget
from kv_transfer.transport.base import PushEndpoint
from observability.origin import Origin
from pdserve.v1.errors import Aborted, FailedPrecondition, Internal, PdserveError, ResourceExhausted
from worker.engine_calls import post_to_engine, run_on_engine
from worker.identity import Role, WorkerIdentity
from worker.record import Recorder
from worker.statuses import RETRY_AFTER_S, failure, typed

log = logging.getLogger(__name__)


class Sequences:
    """`require_ready` raises the status for a sequence that comes while the worker takes none.

    `begin` before the first `reserve`; `stepped` after each step of the engine.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        loop: EngineLoop,
        config: DecodeConfig,
        recorder: Recorder,
        require_ready: Callable[[], None],
    ) -> None:
        self.intake = Intake(loop, identity.instance_id, self, config.verify)
        self.load = loop.engine.snapshot()
        self._identity = identity
        self._loop = loop
        self._config = config
        self._recorder = recorder
        self._require_ready = require_ready
        self._endpoint: PushEndpoint | None = None
        self._admissions = Admissions()
        self._publisher = Publisher(config.max_pending_steps, self._on_router_gone)
        # The engine thread's.
        self._handovers = HandOvers(self.intake.table.counters)
        self._lease_added = asyncio.Event()

    def begin(self, endpoint: PushEndpoint) -> None:
        """On the asyncio loop that owns the tables from now on. `endpoint`: where KV is pushed to."""
        self._asyncio = asyncio.get_running_loop()
        self._endpoint = endpoint

    async def wait_until_empty(self) -> None:
        await self._admissions.wait_until_empty()

    # -- what a router asks ------------------------------------------------------------------------

    async def reserve(
        self, key: TransferKey, router_id: str, request: SequenceRequest, mode: Mode, origin: Origin
    ) -> PushTarget | None:
        """Lets a sequence in: where to push its KV, or None for one that is computed here. The same key
        again gets the same answer. Raises PdserveError, or NoRoom or CannotFit."""
        admission = self._admissions.get(request.sequence_id)
        if admission is None:
            record = DecodeRecord(self._recorder.record(key, origin))
            admission = self._admit(key, router_id, request, mode, record)
            try:
                admission.grant(await run_on_engine(self._loop, lambda engine: self._take(engine, admission)))
            except (EngineError, PdserveError) as error:
                # The engine took nothing, and the router may ask again with the same key.
                refusal = typed(error) if isinstance(error, EngineError) else error
                self._admissions.remove(admission, refusal)
                admission.refuse(error)
                raise
            except BaseException:  # a cancel mostly: what it takes all the same is given back
                self._drop(admission)
                raise
            self._lease_added.set()
        elif admission.router_id != router_id:
            raise FailedPrecondition(f"{key} is another router's", reason="FOREIGN_ROUTER")
        return await asyncio.shield(admission.granted)

    def release(self, keys: Sequence[TransferKey]) -> int:
        """Idempotent; how many of the keys still held something."""
        num_released = 0
        for key in keys:
            admission = self._admissions.get(str(key))
            if admission is None:
                self.intake.table.release(key)  # a Reserve for it that is still on its way is refused
            else:
                num_released += self._drop(admission)
        return num_released

    def subscribe(self, router_id: str) -> Subscription:
        return self._publisher.subscribe(router_id)

    def unsubscribe(self, subscription: Subscription) -> None:
        self._publisher.unsubscribe(subscription)

    def _on_router_gone(self, router_id: str) -> None:
        for admission in self._admissions.of_router(router_id):
            self._drop(admission)

    def _admit(
        self, key: TransferKey, router_id: str, request: SequenceRequest, mode: Mode, record: DecodeRecord
    ) -> Admission:
        name, role = self._identity.worker_id, self._identity.role
        self._require_ready()
        if mode is Mode.PREFILL_HERE and role is not Role.COLOCATED:
            raise FailedPrecondition(f"{name} is a {role.value} worker: it runs no prompts", reason="ROLE")
        if router_id not in self._publisher:
            raise FailedPrecondition(f"router {router_id} has no subscription", reason="NO_SUBSCRIPTION")
        if mode is Mode.PREFILL_HERE and self.load.num_waiting >= self._config.max_num_waiting:
            raise ResourceExhausted(f"{name} is full", reason="BACKLOG", retry_after_s=RETRY_AFTER_S)
        self.intake.table.require_unused(key)
        for older in self._admissions.older_epochs(key):
            self._drop(older)
        admission = Admission(key, router_id, request, mode, self._asyncio.create_future(), record)
        self._admissions.add(admission)
        return admission

    def _drop(self, admission: Admission, outcome: PdserveError | Released = Released.BY_ROUTER) -> bool:
        """Ends it in whatever state, without a word to its router. False if it had ended before."""
        if not self._admissions.remove(admission, outcome):
            return False
        admission.refuse(Aborted(f"{admission.key} was released", reason="TRANSFER_ENDED"))
        self.intake.table.release(admission.key)
        post_to_engine(self._loop, lambda engine: self._cancel(engine, admission))
        return True

    def end_all(self, error: PdserveError) -> None:
        """Every router hears it, and its streams end."""
        for admission in self._admissions.all():
            self._publisher.tell_failure(admission.router_id, admission.key, error)
            self._drop(admission, error)
        self._publisher.finish(error)

    async def watch_leases(self) -> None:
        """The one timer: sleeps until a lease could run out, or the first one begins."""
        while True:
            self._lease_added.clear()
            left_s = self.intake.table.expire()
            try:
                await asyncio.wait_for(self._lease_added.wait(), left_s)
            except asyncio.TimeoutError:
                continue

    # -- what happens to sequences: posted to the asyncio loop ----------------------------------------

    def _publish(self, result: StepResult, started: Mapping[str, HandOver]) -> None:
        batches = step_batches(result.outputs, self._admissions, started)
        has_ended = False
        for output in result.outputs:
            if output.is_last and (admission := self._admissions.get(output.sequence_id)) is not None:
                has_ended = True
                self._admissions.remove(admission, output.finish_reason or failure(output))
                self.intake.table.release(admission.key)  # its key is used up
        self._publisher.tell_step(batches, is_load_news=has_ended)

    def _on_joined(self, key: TransferKey, first: NewToken) -> None:
        admission = self._admissions.get(str(key))
        if admission is not None:
            admission.record.begun()
            self._publisher.tell(admission.router_id, StepBatch(tokens=[StepToken(key, first)]))

    def _on_broke(self, key: TransferKey, error: PdserveError) -> None:
        admission = self._admissions.get(str(key))
        if admission is not None:
            log.info("failed: %s", error.message, extra=admission.record.ids)
            self._admissions.remove(admission, error)
            self._publisher.tell_failure(admission.router_id, key, error)

    def _on_freed(self, key: TransferKey) -> None:
        """An admission is still there only where P took its transfer back; the router hears that from P."""
        admission = self._admissions.get(str(key))
        if admission is not None:
            self._admissions.remove(admission, Released.BY_SENDER)
        self._tell_load()

    def _tell_load(self) -> None:
        self._publisher.tell_step({}, is_load_news=True)

    # -- from other threads ------------------------------------------------------------------------

    def joined(self, reservation: Reservation, first: NewToken, load: EngineLoad) -> None:
        self.load = load
        self._handovers.joined(str(reservation.key), reservation)
        self._asyncio.call_soon_threadsafe(self._on_joined, reservation.key, first)

    def broke(self, key: TransferKey, error: PdserveError) -> None:
        self._asyncio.call_soon_threadsafe(self._on_broke, key, error)

    def quarantined(self, load: EngineLoad) -> None:
        self.load = load
        self._asyncio.call_soon_threadsafe(self._tell_load)

    def freed(self, key: TransferKey, load: EngineLoad) -> None:
        self.load = load
        self._asyncio.call_soon_threadsafe(self._on_freed, key)

    def _take(self, engine: Engine, admission: Admission) -> PushTarget | None:
        """On the engine's thread."""
        if admission.mode is Mode.PREFILL_HERE:
            engine.add(admission.request)
            self.load = engine.snapshot()
            return None
        lease_s = self._config.lease_s
        blocks = self.intake.reserve(engine, admission.key, admission.request, lease_s)
        self.load = engine.snapshot()
        if self._endpoint is None:
            raise Internal(f"{self._identity.worker_id} was not started")
        return PushTarget(
            key=admission.key,
            instance_id=self._identity.instance_id,
            ways=self._endpoint.ways,
            num_cached_blocks=blocks.num_cached_blocks,
            num_blocks=len(blocks.block_ids),
            lease_s=lease_s,
        )

    def _cancel(self, engine: Engine, admission: Admission) -> None:
        if engine.cancel(admission.request.sequence_id):
            self._handovers.left(admission.request.sequence_id)
            self.freed(admission.key, engine.snapshot())

    def stepped(self, result: StepResult) -> None:
        started = self._handovers.stepped(result, time.time_ns())
        self.load = self._loop.engine.snapshot()
        self._asyncio.call_soon_threadsafe(self._publish, result, started)
