"""The parts put together: everything that both fronts (gRPC and HTTP) and the process need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from google.protobuf.message import Message

from observability.origin import TraceContext
from observability.tracing import Service, make_tracer
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2
from pdserve.v1.errors import InvalidArgument
from router.config import RouterConfig
from router.deadline import Deadline
from router.dispatch import Dispatcher
from router.events import LifetimeEvent, Listener, log_event
from router.fanout import first_then_others, merged, numbered_from
from router.fleet.control import ANSWER_TIMEOUT_S, Answer, ControlLink, watch
from router.fleet.workers import WorkerTable
from router.front.checks import DEFAULT_MAX_TOKENS
from router.front.intake import Intake
from router.metrics.scrape import RouterMetrics
from router.outputs import Output
from router.recent.recent import Recent
from router.tasks import Tasks
from router.text.model_folder import read_model_folder
from router.text.tokenizer import TextCodec
from router.trace import Tracing

_LOOK_EVERY_S = 0.25


class Router:
    """Made and used on one event loop. `start`, then `generate` any number of times, then `close`."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ModelFolderError and TrustError."""
        self.config = config
        self.tasks = Tasks()
        trust = config.trust.read()
        own_name = config.instance_id or config.router_id
        self.table = WorkerTable(trust, own_name, self.tasks, config.worker_timeout_s, config.suspect_after_s)
        self.recent = Recent()
        self._listeners: list[Listener] = [log_event, self.recent.note_event]
        folder = read_model_folder(config.model_dir)
        self._folder = folder
        self._codec = TextCodec(folder)
        self._intake = Intake(config, folder, self._codec, self.table, self._tell)
        self._dispatcher = Dispatcher(self.table, config, own_name)
        self.metrics = RouterMetrics(config.model, config.router_id, self.table, self._dispatcher)
        service = Service("router", config.cluster, config.router_id)
        self._tracing = Tracing(make_tracer(config.observability.traces, service), config.model)
        self._control = ControlLink(trust, config.control, config.control_file)

    def start(self) -> None:
        self.tasks.start(watch(self._control, self.config.router_id, self.table), "watch of the controller")
        self.tasks.start(self.table.watch_silence(), "watch of the workers")
        self.tasks.start(self._watch_readers(), "watch of the readers")

    async def _watch_readers(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self._dispatcher.cut_slow_readers()

    def on_event(self, listener: Listener) -> None:
        self._listeners.append(listener)

    async def generate(
        self,
        message: generation_pb2.GenerateRequest,
        deadline: Deadline,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
        caller: TraceContext | None = None,
    ) -> AsyncGenerator[Output, None]:
        """One request's whole answer. Closing the generator cancels the request.

        `deadline` is entered by the caller around all of its work. Where the message names no limit,
        `default_max_tokens` are generated, or what fits. `caller`: the trace that it belongs to.
        Raises PdserveError.
        """
        with (
            self.metrics.requests.measured(deadline) as measure,
            self._tracing.request(message, deadline, caller) as trace,
        ):
            self._dispatcher.admission.refuse_if_full()
            requests = await self._intake.accept(message, deadline, default_max_tokens, trace)
            if len(requests) == 1:
                outputs = self._dispatcher.generate(requests[0])
            else:
                outputs = first_then_others(requests, self._dispatcher.generate)
            with self.recent.follow(requests) as followed:
                async with aclosing(outputs):
                    async for output in outputs:
                        measure.note(output)
                        trace.note(output)
                        followed.note(output)
                        yield output

    async def generate_all(
        self,
        messages: Sequence[generation_pb2.GenerateRequest],
        deadline: Deadline,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
        caller: TraceContext | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Several requests as one, all with the same n: sequence i of request k has the index k · n + i."""
        if len(messages) == 1:
            one = self.generate(messages[0], deadline, default_max_tokens, caller)
            async with aclosing(one) as outputs:
                async for output in outputs:
                    yield output
            return
        with self.metrics.requests.measured(deadline):
            self._refuse_too_many(len(messages))
        with self._tracing.several(len(messages), deadline, caller) as around:
            streams = []
            for number, message in enumerate(messages):
                start = number * (message.n if message.HasField("n") else 1)
                one = self.generate(message, deadline, default_max_tokens, around)
                streams.append(numbered_from(start, one))
            async with aclosing(merged(streams)) as outputs:
                async for output in outputs:
                    yield output

    def _refuse_too_many(self, num_messages: int) -> None:
        limit = self.config.max_queued_requests
        if num_messages > limit:
            raise InvalidArgument(f"prompt: {num_messages} of them at once, at most {limit} are taken")
        self._dispatcher.admission.refuse_if_full(num_messages)

    @property
    def max_model_len(self) -> int:
        """Prompt and output together."""
        return self._intake.max_model_len

    @property
    def codec(self) -> TextCodec:
        return self._codec

    def describe_model(self) -> generation_pb2.GetModelResponse:
        return generation_pb2.GetModelResponse(
            id=self.config.model,
            max_model_len=self.max_model_len,
            vocab_size=self._folder.vocab_size,
            dtype=self.table.dtype or self._folder.dtype,
            eos_token_ids=self._folder.eos_token_ids,
            has_chat_template=self._codec.has_chat_template,
            shape=self._folder.shape,
        )

    async def ask_controller(
        self,
        method: Callable[[cluster_pb2_grpc.ControlAsyncStub], Answer],
        message: Message,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> cluster_pb2.ClusterSnapshot:
        """What this router does is added. Raises PdserveError."""
        snapshot = await self._control.ask(method, message, timeout_s)
        num_waiting = self._dispatcher.admission.num_waiting
        load = self.recent.load(self._dispatcher.num_in_flight - num_waiting, num_waiting)
        snapshot.router.CopyFrom(load)
        return snapshot

    def check_integrity(self) -> None:
        """Raises IntegrityError."""
        self._dispatcher.check_integrity()

    def check_idle(self) -> None:
        """With no request in flight everything is back where it began. Raises IntegrityError."""
        self._dispatcher.check_idle()

    async def close(self) -> None:
        self._dispatcher.admission.close()
        await self.table.close()
        self._codec.close()
        await self.tasks.close()
        await self._control.close()
        await self._tracing.close()

    def _tell(self, event: LifetimeEvent) -> None:
        for listener in self._listeners:
            listener(event)
