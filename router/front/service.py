"""The gRPC front: `Generation` and `Admin`. Messages in, messages out; everything else is the router's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from observability.origin import TraceContext, trace_of
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2
from router.deadline import Deadline
from router.fleet.control import ANSWER_TIMEOUT_S, START_TIMEOUT_S, Answer
from router.front import wire
from router.front.calls import Calls
from router.outputs import Delta, Finished, Output, Started
from router.router import Router

if TYPE_CHECKING:
    GenerateContext = wire.Context[generation_pb2.GenerateRequest, generation_pb2.GenerateStreamResponse]
    UnaryContext = wire.Context[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]
    ModelContext = wire.Context[generation_pb2.GetModelRequest, generation_pb2.GetModelResponse]

# gRPC speaks of "no deadline" as of one in some hundred years.
_NO_DEADLINE_S = 10 * 365 * 86400.0
# Its clients round what they tell of theirs up, by 1 % at most, and cancel by their own clocks.
_ROUNDED_UP = 0.01
_JITTER_S = 0.02


class GenerationService:
    NAME = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name

    def __init__(self, router: Router) -> None:
        self._router = router
        self.calls = Calls()

    @property
    def max_request_bytes(self) -> int:
        """What the longest prompt takes on the wire, whichever way it is given, and all other fields."""
        return self._router.config.max_prompt_bytes * 5 // 4 + (1 << 20)

    def handlers(self) -> wire.Handlers:
        request, limit = generation_pb2.GenerateRequest, self.max_request_bytes
        return {
            "Generate": wire.unary(request, self.generate, limit),
            "GenerateStream": wire.server_stream(request, self.generate_stream, limit),
            "GetModel": wire.unary(generation_pb2.GetModelRequest, self.get_model),
        }

    async def generate(
        self, message: generation_pb2.GenerateRequest, context: UnaryContext
    ) -> generation_pb2.GenerateResponse:
        completions: dict[int, generation_pb2.Completion] = {}
        deadline = self._deadline(context.time_remaining())
        answer = self._router.generate(message, deadline, caller=_caller(context))
        with self.calls.one():
            async with deadline, aclosing(answer) as outputs:
                async for output in outputs:
                    empty = generation_pb2.Completion(index=output.index)
                    _add(completions.setdefault(output.index, empty), message_of(output))
        ordered = [completions[index] for index in sorted(completions)]
        return generation_pb2.GenerateResponse(request_id=ordered[0].started.request_id, completions=ordered)

    async def generate_stream(
        self, message: generation_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        deadline = self._deadline(context.time_remaining())
        answer = self._router.generate(message, deadline, caller=_caller(context))
        with self.calls.one():
            async with deadline, aclosing(answer) as outputs:
                async for output in outputs:
                    response = message_of(output)
                    with deadline.put_off():
                        await context.write(response)

    async def get_model(
        self, message: generation_pb2.GetModelRequest, context: ModelContext
    ) -> generation_pb2.GetModelResponse:
        return self._router.describe_model()

    def _deadline(self, remaining_s: float | None) -> Deadline:
        def why() -> str | None:
            return self._router.table.reason_to_wait

        if remaining_s is None or remaining_s > _NO_DEADLINE_S:
            return Deadline(self._router.config.default_timeout_s, why=why)
        return Deadline(remaining_s, why=why, early_s=_ROUNDED_UP * remaining_s + _JITTER_S)


def _caller(context: UnaryContext | GenerateContext) -> TraceContext | None:
    return trace_of(context.invocation_metadata() or ())


class AdminService:
    """Hands on to the controller, and its answers and errors back."""

    NAME = cluster_pb2.DESCRIPTOR.services_by_name["Admin"].full_name

    def __init__(self, router: Router) -> None:
        self._handlers: wire.Handlers = {
            "GetCluster": _proxied(router, cluster_pb2.GetClusterRequest, lambda to: to.GetCluster),
            "ScalePool": _proxied(router, cluster_pb2.ScalePoolRequest, lambda to: to.ScalePool),
            "DrainWorker": _proxied(router, cluster_pb2.DrainWorkerRequest, lambda to: to.DrainWorker),
            "RestartRouter": _proxied(
                router, cluster_pb2.RestartRouterRequest, lambda to: to.RestartRouter, START_TIMEOUT_S
            ),
        }

    def handlers(self) -> wire.Handlers:
        return self._handlers


def _proxied(
    router: Router,
    kind: type[wire.M],
    method: Callable[[cluster_pb2_grpc.ControlAsyncStub], Answer],
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> wire.Handler:
    async def answer(
        message: wire.M, context: wire.Context[wire.M, cluster_pb2.ClusterSnapshot]
    ) -> cluster_pb2.ClusterSnapshot:
        return await router.ask_controller(method, message, timeout_s)

    return wire.unary(kind, answer)


def message_of(output: Output) -> generation_pb2.GenerateStreamResponse:
    response = generation_pb2.GenerateStreamResponse(index=output.index)
    if isinstance(output, Delta):
        piece = output.piece
        delta = generation_pb2.Delta(text=piece.text, token_ids=piece.token_ids, logprobs=piece.logprobs)
        response.delta.CopyFrom(delta)
    elif isinstance(output, Started):
        response.started.CopyFrom(_started(output))
    else:
        response.finished.CopyFrom(_finished(output))
    return response


def _started(started: Started) -> generation_pb2.Started:
    return generation_pb2.Started(
        prompt_tokens=started.prompt_tokens,
        cached_tokens=started.cached_tokens,
        prefill_worker=started.prefill_worker,
        decode_worker=started.decode_worker,
        request_id=started.request_id,
    )


def _finished(finished: Finished) -> generation_pb2.Finished:
    usage, timings = finished.usage, finished.timings
    return generation_pb2.Finished(
        finish_reason=finished.ending.reason,
        matched_stop=finished.ending.matched_stop,
        matched_token_id=finished.ending.matched_token_id,
        usage=generation_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            draft_tokens=usage.draft_tokens,
            accepted_draft_tokens=usage.accepted_draft_tokens,
        ),
        timings=generation_pb2.Timings(
            queue_ms=timings.queue_ms,
            prefill_ms=timings.prefill_ms,
            transfer_ms=timings.transfer_ms,
            transfer_bytes=timings.transfer_bytes,
            ttft_ms=timings.ttft_ms,
            decode_ms=timings.decode_ms,
            mean_itl_ms=timings.mean_itl_ms,
            handover_ms=timings.handover_ms,
            decode_start_ms=timings.decode_start_ms,
            hidden_bytes=timings.hidden_bytes,
            reserve_ms=timings.reserve_ms,
        ),
        num_resumes=finished.num_resumes,
        prefill_worker=finished.prefill_worker,
        decode_worker=finished.decode_worker,
    )


def _add(completion: generation_pb2.Completion, message: generation_pb2.GenerateStreamResponse) -> None:
    if message.HasField("started"):
        completion.started.CopyFrom(message.started)
    elif message.HasField("delta"):
        completion.text += message.delta.text
        completion.token_ids.extend(message.delta.token_ids)
        completion.logprobs.extend(message.delta.logprobs)
    else:
        completion.finished.CopyFrom(message.finished)
