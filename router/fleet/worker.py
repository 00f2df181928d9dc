"""One worker process as this router sees it: its channel, its last report, and what this router has out
on it. A new process at an old address is another Worker.

A decode (or colocated) worker may be chosen once its Subscribe stream has spoken. That stream's end means
that the worker has let go of this router's sequences: all of them are told at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TypeVar

import grpc

from observability.origin import Metadata
from pdserve.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import Cancelled, PdserveError, Unavailable, from_code, from_rpc_error
from router.fleet.holdings import Holdings, ReserveAnswer
from router.fleet.pace import Pace
from router.fleet.parsed import parsed
from router.fleet.placement import DecodeView, PrefillView
from router.fleet.vigil import Vigil, vitals_of
from router.fleet.worker_info import LoadReport, Role, SequenceKey, WorkerInfo, WorkerState, load_of
from router.loss import LEAVES, STALLED, back_off_s, lost_or_left
from router.tasks import Tasks
from router.tokens import token_of
from trust.channels import open_aio_channel
from trust.trust import Trust

T = TypeVar("T")

logger = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A process that is stopped, or a host that is gone, closes no connection: pings find out in 6 s.
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 3000),
    # Without this one a ping waits for a minute, whatever the keepalive's own timeout says.
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A new process at an old address must not be reached through the old one's connection.
    ("grpc.use_local_subchannel_pool", 1),
)


# How long a prefill worker's report of its queue is believed. It comes with the worker's answers only.
_REPORT_HOLDS_S = 1.0


class Worker:
    def __init__(
        self,
        info: WorkerInfo,
        trust: Trust,
        router_id: str,
        tasks: Tasks,
        on_change: Callable[[], None],
        on_room: Callable[[], None],
        timeout_s: float,
        suspect_after_s: float,
    ) -> None:
        self.info = info
        self.state = WorkerState.STARTING
        self.load: LoadReport | None = None
        self.last_chosen = 0
        self.is_gone = False
        self.holdings = Holdings(on_change)
        self._router_id = router_id
        self._tasks = tasks
        self._on_change = on_change
        self._on_room = on_room
        self._timeout_s = timeout_s
        self._others_tokens = 0
        self._reported_at = 0.0
        self._suspect_after_s = suspect_after_s
        self._vigil = Vigil()
        self.pace = Pace()
        self._connected = asyncio.Event()
        self._is_subscribed = False
        self._calls: set[asyncio.Task[object]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._channel = open_aio_channel(info.address, trust, _CHANNEL_OPTIONS)
        self._prefill = worker_pb2_grpc.PrefillWorkerStub(self._channel)
        self._decode = worker_pb2_grpc.DecodeWorkerStub(self._channel)
        self._any = worker_pb2_grpc.WorkerStub(self._channel)

    def start(self) -> None:
        self._loops.append(self._tasks.start(self._watch_connection(), f"connection {self.info.id}"))
        self._loops.append(self._tasks.start(self._watch_vitals(), f"vitals {self.info.id}"))
        if self.info.role is not Role.PREFILL:
            self._loops.append(self._tasks.start(self._subscribe(), f"subscribe {self.info.id}"))

    @property
    def is_usable(self) -> bool:
        """May be given new work."""
        is_reached = self.is_connected and (self._is_subscribed or self.info.role is Role.PREFILL)
        is_ready = self.state is WorkerState.READY and self.suspicion is None
        return is_reached and is_ready and not self.is_gone

    @property
    def suspicion(self) -> str | None:
        """Why it may not live although it is connected. Others do its work meanwhile, if there are any."""
        if self.state is WorkerState.UNHEALTHY:
            return "is unhealthy, as the controller says"
        return self._vigil.complaint() if self._vigil.still_s > self._suspect_after_s else None

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    @property
    def is_idle(self) -> bool:
        return not self._calls and not any(self.holdings.by_name().values())

    def prefill_view(self) -> PrefillView:
        """What others were said to have there is forgotten soon: where no news comes, it would be true for
        ever, and a cancelled prompt of this router may be among it."""
        out = self.holdings.outstanding_tokens
        is_fresh = time.monotonic() - self._reported_at < _REPORT_HOLDS_S
        queued = out + (self._others_tokens if is_fresh else 0)
        return PrefillView(self.info.instance_id, out, queued, self.last_chosen)

    def decode_view(self) -> DecodeView:
        """Nothing reported yet: it is new, so all its blocks are free."""
        load, promises = self.load, self.holdings.promises
        free = self.info.kv_blocks_total if load is None else load.kv_blocks_free
        busy = 0 if load is None else load.num_running + load.num_waiting + load.num_reservations
        return DecodeView(
            self.info.instance_id,
            free - sum(promises.values()),
            busy + len(promises),
            self.last_chosen,
        )

    def note_load(self, message: cluster_pb2.WorkerLoad) -> None:
        """A worker's own report. Prompt tokens beyond those of this router are another router's."""
        before, self.load = self.load, load_of(message)
        self._reported_at = time.monotonic()
        self._others_tokens = max(0, self.load.queued_prompt_tokens - self.holdings.outstanding_tokens)
        if before is None or self.load.has_more_room_than(before):
            self._on_room()

    # Calls.

    async def reserve(self, request: worker_pb2.ReserveRequest, metadata: Metadata) -> ReserveAnswer:
        """The error is a value: whoever asked may be gone, and the answer must still be looked at."""
        try:
            answer = self._decode.Reserve(request, timeout=self._timeout_s, metadata=metadata)
            response: worker_pb2.ReserveResponse = parsed(await answer)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        except PdserveError as error:
            return error
        self.note_load(response.load)
        return response

    async def release(self, key: SequenceKey) -> None:
        """Raises PdserveError."""
        keys = [worker_pb2.SequenceKey(transfer_id=key.transfer_id, epoch=key.epoch)]
        try:
            await self._decode.Release(worker_pb2.ReleaseRequest(keys=keys), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def metrics(self, timeout_s: float) -> bytes | PdserveError:
        """In Prometheus' text format. The error is a value: it is no failure of the router's."""
        try:
            response = parsed(await self._any.Metrics(worker_pb2.MetricsRequest(), timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        except PdserveError as error:
            return error
        return response.exposition

    def prefill(
        self, request: worker_pb2.PrefillRequest, metadata: Metadata
    ) -> grpc.aio.UnaryStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse]:
        return self._prefill.Prefill(request, metadata=metadata)

    def run(self, work: Coroutine[object, object, T], name: str) -> asyncio.Task[T]:
        """Start work that uses the channel: `close` waits for it."""
        task = self._tasks.start(work, f"{name} {self.info.id}")
        self._calls.add(task)
        task.add_done_callback(self._call_ended)
        return task

    def _call_ended(self, task: asyncio.Task[T]) -> None:
        self._calls.discard(task)
        self._on_change()

    # Its end.

    def lose(self, reason: str) -> None:
        """The controller's word that it is gone, or this router's that it cannot be reached."""
        self.is_gone = True
        error = Unavailable(f"worker {self.info.id} {reason}", reason="WORKER_LOST")
        self._lose_decoding(error)
        self.holdings.lose_prefills(error)
        for task in self._loops:
            task.cancel()

    def move(self, why: str) -> None:
        """What this router has here goes on elsewhere, and what still comes from here is for nobody."""
        if not self.holdings.can_move:
            return
        error = Unavailable(f"worker {self.info.id} {why}", reason=STALLED)
        logger.warning("worker=%s %s: its streams go on elsewhere", self.info.id, why)
        self.holdings.lose_decoding(error)
        self.holdings.lose_prefills(error)

    def passed(self, elapsed_s: float) -> None:
        """Time, for its silence to be measured."""
        self._vigil.passed(elapsed_s)

    async def close(self) -> None:
        """After `lose`. The channel goes last: closing it under a call would look like a cancel."""
        while self._calls:
            await asyncio.wait(set(self._calls))
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._channel.close(None)

    def _lose_decoding(self, error: PdserveError) -> None:
        self._is_subscribed = False
        self.holdings.lose_decoding(error)
        self._on_change()

    # Its loops.

    async def _watch_connection(self) -> None:
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                self._connected.set()
            else:
                self._connected.clear()
                # A server that ends lets go of the connection first, and may leave late calls unanswered.
                reason = LEAVES if self.state is WorkerState.DRAINING else "WORKER_LOST"
                error = Unavailable(f"worker {self.info.id} is not connected", reason=reason)
                self.holdings.answer_reserving(error)
                self.holdings.lose_prefills(error)
            self._on_room()
            await self._channel.wait_for_state_change(state)

    async def _watch_vitals(self) -> None:
        num_failures = 0
        while True:
            await self._connected.wait()
            call = self._any.Watch(worker_pb2.WatchVitalsRequest())
            try:
                async for message in call:
                    self._vigil.heard(vitals_of(parsed(message)))
                    num_failures = 0
            except grpc.aio.AioRpcError as failure:
                if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return  # an older worker: its connection must do
            except PdserveError as failure:
                logger.warning("no signs of life of worker=%s: %s", self.info.id, failure.message)
            finally:
                call.cancel()
            self._vigil.forget()
            num_failures += 1
            await asyncio.sleep(back_off_s(num_failures, base_s=0.1))

    async def _subscribe(self) -> None:
        num_failures = 0
        while True:
            await self._connected.wait()
            request = worker_pb2.SubscribeRequest(router_id=self._router_id)
            error: PdserveError = Cancelled("ended its stream")
            call = self._decode.Subscribe(request)
            try:
                async for step in call:
                    self._on_step(parsed(step))
                    num_failures = 0
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            except PdserveError as failure:
                error = failure
            finally:
                call.cancel()
            num_failures += 1
            logger.warning("stream of worker=%s ended: %s", self.info.id, error.message)
            self._lose_decoding(lost_or_left(error, self.info.id))
            await asyncio.sleep(back_off_s(num_failures, base_s=0.1))

    def _on_step(self, step: worker_pb2.StepOutput) -> None:
        decoding = self.holdings.decoding
        if not self._is_subscribed:
            self._is_subscribed = True
            self._on_room()
        for token in step.tokens:
            key = SequenceKey(token.transfer_id, token.epoch)
            self.holdings.discharge(key)
            # None: an attempt that was given up; its Release is on the way.
            if (inbox := decoding.get(key)) is not None:
                inbox.put_decode(token_of(token))
        for failed in step.failed:
            if (inbox := decoding.get(SequenceKey(failed.transfer_id, failed.epoch))) is not None:
                told = f"worker {self.info.id}: {failed.message}"
                error = from_code(failed.code, told, failed.reason or None)
                inbox.fail_decode(error, let_go=True)
        if step.HasField("load"):
            self.note_load(step.load)
