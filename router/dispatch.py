"""The life of one sequence: reserve → prefill → stream → release, again on other workers when these are
lost. Knows workers and tokens; knows no gRPC front, no tokenizer and no n.

What is held for a sequence hangs on its Attempt, and every way out of an attempt leads through `_release`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from observability.tracing import Span
from pdserve.v1 import generation_pb2, worker_pb2
from pdserve.v1.errors import PdserveError, ResourceExhausted, Unavailable
from router.admission import Admission
from router.attempt import Attempt, Hold
from router.config import RouterSettings
from router.events import Moment
from router.failure import FAILURES, failure_of
from router.fleet.placing import Placing
from router.fleet.worker import Worker
from router.fleet.worker_info import SequenceKey
from router.fleet.workers import WorkerTable
from router.integrity import IntegrityError
from router.loss import LEAVES, AttemptLost, Verdict, back_off_s, judge
from router.outputs import Delta, Output
from router.prefill import read_prefill
from router.queue_order import QueuePolicy
from router.release import Releaser
from router.report import finished, started
from router.request import Request, RequestState
from router.slow_readers import SlowReaders
from router.tokens import Token

_TRANSFER_END_TIMEOUT_S = 5.0


class Dispatcher:
    def __init__(self, table: WorkerTable, settings: RouterSettings, router_id: str) -> None:
        self._table = table
        self._router_id = router_id
        self._in_flight: set[str] = set()
        self._attempts: dict[SequenceKey, Attempt] = {}
        self.slow_readers = SlowReaders(settings.max_unread_tokens)
        # Attempts that were made again: workers were lost, left or stalled, or none had room.
        self.num_resumes = 0
        self.num_moves = 0
        self.num_refusals = 0
        self._releaser = Releaser()
        self._placing = Placing(table, settings.prefill_backlog_tokens)
        policy = QueuePolicy(settings.queue_order, settings.queue_aging_s)
        self.admission = Admission(
            settings.max_queued_requests, policy, self._placing, has_room_out=self._has_room_out
        )
        table.on_change(self.admission.grant)
        table.on_room(self.admission.room)

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yields Started, Deltas, Finished, or raises one PdserveError; holds nothing anywhere after."""
        with self._tracked(request):
            while not request.is_done:
                attempt = Attempt(request)
                self._attempts[attempt.key] = attempt
                try:
                    with self._no_room_in_time(request):
                        await self._queue(attempt)  # holds nothing on any worker
                        with attempt.phase("reserve") as span:
                            await self._reserve(attempt, span)  # a decode worker has blocks for it
                    self._prefill(attempt)  # a prefill worker computes and pushes
                    while not request.is_done:
                        for output in await self._next_outputs(attempt):
                            yield output
                except AttemptLost as loss:
                    request.lose(loss)
                    self._note_loss(loss)
                finally:
                    self._release(attempt)

    @contextmanager
    def _no_room_in_time(self, request: Request) -> Iterator[None]:
        """A deadline that passes after workers refused it, or one before it in the queue, is told as what it
        was that took so long.
        """
        try:
            yield
        except asyncio.CancelledError:
            is_for_room = request.num_refusals > 0 or self.admission.waits_for_room
            if is_for_room and request.deadline.is_over:
                retry_after_s = self.admission.retry_after_s
                raise ResourceExhausted(
                    "no room in time", reason="NO_ROOM", retry_after_s=retry_after_s
                ) from None
            raise

    async def _queue(self, attempt: Attempt) -> None:
        request = attempt.request
        if request.state is RequestState.RECEIVED:
            request.move(RequestState.QUEUED)
        elif not request.num_refusals:
            await asyncio.sleep(back_off_s(request.num_resumes))
        request.tell(Moment.QUEUED)
        with attempt.phase("queue"):
            await self.admission.enter(attempt)
        if request.timeline.prefill_begun_at is None:
            request.timeline.left_queue_at = time.monotonic()

    async def _reserve(self, attempt: Attempt, span: Span) -> None:
        """On the first decode worker that has room, best placed first."""
        request = attempt.request
        for worker in self._placing.decode_candidates(attempt):
            if worker.is_usable and await self._reserve_on(worker, attempt):
                request.num_refusals = 0
                self.admission.answered(attempt)
                _note_affinity(attempt)
                request.move(RequestState.RESERVED)
                request.tell(Moment.RESERVED, worker.info.id)
                span.set({"pdserve.worker": worker.info.id})
                return
        raise self._no_room(request, ResourceExhausted("no decode worker has room now"))

    async def _reserve_on(self, worker: Worker, attempt: Attempt) -> bool:
        """False where this worker cannot take it now. Raises what no other worker would do better."""
        key = attempt.key
        call = worker_pb2.ReserveRequest(
            sequence=attempt.spec(), router_id=self._router_id, mode=_mode(worker, attempt)
        )
        # Tokens may come as soon as the worker has the sequence.
        worker.holdings.decoding[key] = attempt.inbox
        promises = worker.holdings.promises
        promises[key] = -(-attempt.num_tokens // max(1, worker.info.block_size))
        hold = Hold(worker, key, attempt.inbox, worker.run(worker.reserve(call, attempt.metadata), "reserve"))
        hold.reserving.add_done_callback(lambda _: promises.pop(key, None))
        attempt.holds.append(hold)
        self._table.chosen(worker)
        answer = await worker.holdings.answer_to(key, hold.reserving)
        if not isinstance(answer, PdserveError):
            attempt.decode_worker = worker
            attempt.reservation = answer.reservation
            return True
        verdict = judge(answer)
        if verdict is Verdict.FINAL:
            raise answer
        if verdict in (Verdict.RETRY, Verdict.MOVE):
            attempt.request.avoid.add(worker.info.instance_id)
        attempt.holds.remove(hold)
        self._releaser.release(hold)
        return False

    def _prefill(self, attempt: Attempt) -> None:
        request, worker = attempt.request, attempt.prefill_worker
        if worker is None or not worker.is_usable:
            raise AttemptLost(Unavailable("the prefill worker has left", reason=LEAVES), Verdict.MOVE)
        request.move(RequestState.PREFILLING)
        if request.timeline.prefill_begun_at is None:
            request.timeline.prefill_begun_at = time.monotonic()
        request.tell(Moment.PREFILL_BEGIN, worker.info.id)
        if worker is not attempt.decode_worker:
            if request.timeline.report is None:
                attempt.inbox.await_report()
            attempt.prefill_task = worker.run(read_prefill(attempt, worker), "prefill")

    async def _next_outputs(self, attempt: Attempt) -> list[Output]:
        """All tokens that are there, as one Delta: a slow reader gets fewer and longer ones."""
        request, transcript = attempt.request, attempt.request.transcript
        if transcript.ending is None:
            tokens = await self._next_tokens(attempt)
            is_start = self._note_tokens(attempt, tokens)
            delta = Delta(request.plan.index, transcript.push(tokens))
            return [started(attempt), delta] if is_start else [delta]
        if attempt.prefill_task is not None and attempt.inbox.decode_let_go:
            # The decode worker finished it, so its KV arrived: the figures of the transfer are on the way.
            await asyncio.wait({attempt.prefill_task}, timeout=_TRANSFER_END_TIMEOUT_S)
        request.move(RequestState.DONE)
        return [finished(attempt)]

    async def _next_tokens(self, attempt: Attempt) -> list[Token]:
        try:
            return await attempt.inbox.take()
        except PdserveError as error:
            verdict = judge(error)
            if verdict is Verdict.FINAL:
                raise
            if verdict is Verdict.WAIT:
                raise self._no_room(attempt.request, error) from error
            self._blame(attempt)
            raise AttemptLost(error, verdict) from error

    def _note_tokens(self, attempt: Attempt, tokens: list[Token]) -> bool:
        """Whether the first token of the request is among them."""
        request, timeline = attempt.request, attempt.request.timeline
        timeline.last_token_at = time.monotonic()
        if request.state is RequestState.PREFILLING:
            request.move(RequestState.STREAMING)
        if timeline.report is None:
            timeline.report = tokens[0].report
        if tokens[0].report is not None:
            self._placing.note_prefill(attempt, tokens[0].report)
        for token in tokens:
            timeline.handover = token.handover or timeline.handover
        is_first = timeline.first_token_at is None
        if is_first:
            timeline.first_token_at = timeline.last_token_at
            request.tell(Moment.FIRST_TOKEN, _name(attempt.prefill_worker))
        # After the first token, also where both workers were heard since the last look.
        if attempt.inbox.heard_from_decode and not attempt.is_decode_begun:
            attempt.is_decode_begun = True
            request.is_warm.set()
            request.tell(Moment.DECODE_BEGIN, _name(attempt.decode_worker))
        return is_first

    def _note_loss(self, loss: AttemptLost) -> None:
        if loss.verdict is Verdict.WAIT:
            self.num_refusals += 1
        elif loss.verdict is Verdict.MOVE:
            self.num_moves += 1
        else:
            self.num_resumes += 1

    def _no_room(self, request: Request, error: PdserveError) -> AttemptLost:
        self.admission.no_room(back_off_s(request.num_refusals + 1, base_s=0.05, limit_s=0.5))
        return AttemptLost(error, Verdict.WAIT)

    def _has_room_out(self) -> bool:
        """What a worker has not been told to release yet counts."""
        return self._releaser.num_pending > 0 or any(each.holdings.decoding for each in self._table.all())

    def _blame(self, attempt: Attempt) -> None:
        """Whom the next attempt should rather not use. What the prefill worker reports may be either's."""
        workers = [attempt.decode_worker]
        if attempt.inbox.is_failed_by_prefill:
            workers.append(attempt.prefill_worker)
        attempt.request.avoid.update(worker.info.instance_id for worker in workers if worker is not None)

    def _release(self, attempt: Attempt) -> None:
        """Idempotent and at once; what workers must hear is sent in the background."""
        self._attempts.pop(attempt.key, None)
        if attempt.prefill_task is not None:
            attempt.prefill_task.cancel()
        if attempt.prefill_worker is not None:
            attempt.prefill_worker.holdings.discharge(attempt.key)
        while attempt.holds:
            self._releaser.release(attempt.holds.pop())
        self.admission.answered(attempt)

    @contextmanager
    def _tracked(self, request: Request) -> Iterator[None]:
        """Counts the request; DONE and one FINISHED event whichever way it leaves."""
        if request.plan.index == 0:
            self.admission.refuse_if_full()
        transfer_id = request.plan.transfer_id
        self._in_flight.add(transfer_id)
        outcome = "NONE"
        request.tell(Moment.RECEIVED, at=request.timeline.received_at)
        try:
            yield
            ending = request.transcript.ending
            if ending is not None:
                outcome = generation_pb2.FinishReason.Name(ending.reason)
        except FAILURES as error:
            outcome = failure_of(error, request.deadline).code
            raise
        finally:
            self._in_flight.discard(transfer_id)
            request.is_warm.set()
            if not request.is_done:
                request.move(RequestState.DONE)
            request.tell(Moment.FINISHED, outcome=outcome)

    def cut_slow_readers(self) -> None:
        for attempt, error in self.slow_readers.to_cut(self._attempts.values()):
            attempt.inbox.drop(error)
            self._release(attempt)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def check_integrity(self) -> None:
        """At any time: nothing is held for a request that is not in flight. Raises IntegrityError."""
        problems: list[str] = []
        if self.admission.num_waiting > len(self._in_flight):
            problems.append(f"{self.admission.num_waiting} wait, {len(self._in_flight)} in flight")
        for worker in self._table.all():
            for name, keys in worker.holdings.by_name().items():
                for key in keys:
                    if key.transfer_id not in self._in_flight:
                        problems.append(f"{worker.info.id}: {name} of {key.transfer_id}")
        if problems:
            raise IntegrityError("; ".join(problems))

    def check_idle(self) -> None:
        """With nothing in flight: every table is empty and every release was told. Raises IntegrityError."""
        self.check_integrity()
        if self._in_flight or self.admission.num_waiting or self._releaser.num_pending:
            raise IntegrityError(
                f"in flight {len(self._in_flight)}, waiting {self.admission.num_waiting}, "
                f"releases pending {self._releaser.num_pending}"
            )


def _mode(worker: Worker, attempt: Attempt) -> worker_pb2.ReserveRequest.Mode:
    if worker is attempt.prefill_worker:
        return worker_pb2.ReserveRequest.MODE_PREFILL_HERE
    return worker_pb2.ReserveRequest.MODE_RECEIVE_KV


def _note_affinity(attempt: Attempt) -> None:
    affinity = attempt.request.affinity
    if attempt.request.plan.index == 0 and attempt.prefill_worker and attempt.decode_worker:
        affinity.prefill_instance = attempt.prefill_worker.info.instance_id
        affinity.decode_instance = attempt.decode_worker.info.instance_id


def _name(worker: Worker | None) -> str | None:
    return worker.info.id if worker is not None else None
