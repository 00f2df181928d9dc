"""Load over pdserve's own gRPC."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from types import TracebackType

from typing_extensions import Self

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.client import Answer, RequestFailed, Sampling, Served
from pdserve.bench.serve.workload import PlannedRequest
from pdserve.client import Client, Delta, Finished
from pdserve.v1.errors import PdserveError

_SERVED_TIMEOUT_S = 20.0


class GrpcClient:
    """`router` is its address, or a client of it that is closed with this one. `timeout_s` is each request's
    limit, the server's default if None."""

    def __init__(
        self, router: str | Client, sampling: Sampling | None = None, timeout_s: float | None = None
    ) -> None:
        self._client = Client(router) if isinstance(router, str) else router
        self._sampling = sampling or Sampling()
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.close()

    async def served(self) -> Served:
        try:
            model = await self._client.get_model(timeout=_SERVED_TIMEOUT_S)
        except PdserveError as error:
            raise BenchError(f"the router does not answer: {error}") from error
        return Served(model.id, model.max_model_len, model.vocab_size)

    async def send(self, request: PlannedRequest, on_tokens: Callable[[], None]) -> Answer:
        events = self._client.generate_stream(
            request.prompt,
            timeout=self._timeout_s,
            max_tokens=request.max_tokens,
            temperature=self._sampling.temperature,
            ignore_eos=self._sampling.ignore_eos,
        )
        finished: Finished | None = None
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Delta):
                        if event.token_ids:
                            on_tokens()
                    elif isinstance(event, Finished):
                        finished = event
        except PdserveError as error:
            raise RequestFailed(error.code.name, str(error)) from error
        if finished is None:
            raise RequestFailed("BROKEN_STREAM", "the stream ended without an end")
        usage = finished.usage
        return Answer(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, finished.timings)
