"""What clients feel, measured where they stand: at the router, on its own clock.

Of a request with n > 1 each sequence counts by itself, as with other servers. Names and units are those that
users of vLLM know; what a disaggregated system has besides comes on top. Labels are bounded: finish reasons,
status codes, phases.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import CODE_NAMES, PdserveError
from router.deadline import Deadline
from router.metrics.buckets import LATENCY_SECONDS, REQUEST_SECONDS, TOKEN_SECONDS, TOKENS
from router.outputs import Delta, Finished, Output, Started, Timings

# A stop string, a stop id and EOS are one to whoever counts.
FINISH_REASONS = {
    generation_pb2.FINISH_REASON_EOS: "stop",
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def seconds(name: str, help: str, buckets: tuple[float, ...] = LATENCY_SECONDS) -> Histogram:
            return Histogram(f"pdserve_{name}_seconds", help, buckets=buckets, registry=registry)

        def tokens(name: str, help: str) -> Histogram:
            return Histogram(f"pdserve_{name}", help, buckets=TOKENS, registry=registry)

        def count(name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"pdserve_{name}", help, labels, registry=registry)

        self.ttft = seconds("time_to_first_token", "Request received → first token on its way to the client.")
        self.itl = seconds(
            "inter_token_latency", "Between one delivery of tokens to a client and the next.", TOKEN_SECONDS
        )
        self.e2e = seconds("e2e_request_latency", "Request received → last token.", REQUEST_SECONDS)
        self.tpot = seconds(
            "request_time_per_output_token",
            "Of a finished request: first token → last token, over the tokens after the first.",
            TOKEN_SECONDS,
        )
        self.queue = seconds(
            "request_queue_time",
            "Request received → its prefill begun, in all queues.",
            REQUEST_SECONDS,
        )
        self.prefill = seconds("request_prefill_time", "Prefill begun → first token drawn.", REQUEST_SECONDS)
        self.decode = seconds("request_decode_time", "First token → last token.", REQUEST_SECONDS)
        self.inference = seconds("request_inference_time", "Prefill begun → last token.", REQUEST_SECONDS)
        self.kv_transfer = seconds(
            "request_kv_transfer_time", "First block pushed → commit acknowledged; mostly beside the prefill."
        )
        self.kv_ready = seconds(
            "request_kv_ready_time",
            "First token drawn → all KV at the decode worker, by the workers' clocks.",
        )
        self.decode_start = seconds(
            "request_decode_start_time",
            "First token drawn → first step of the decode worker, by the workers' clocks.",
        )
        phase = Histogram(
            "pdserve_time_to_first_token_phase_seconds",
            "TTFT of finished requests, in the parts that add up to it: in all queues, asking for room, and "
            "the prefill until its token is here.",
            ["phase"],
            buckets=LATENCY_SECONDS,
            registry=registry,
        )
        self.in_queue, self.in_reserve, self.in_prefill = map(phase.labels, ("queue", "reserve", "prefill"))
        self.request_prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens of a finished request.")
        self.request_generation_tokens = tokens(
            "request_generation_tokens", "Generated tokens of a finished request."
        )
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.generation_tokens = count("generation_tokens", "Tokens generated.")
        self.prefix_queries = count(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache of a prefill worker."
        )
        self.prefix_hits = count("prefix_cache_hits", "Of those, the ones that were cached.")
        self.resumed = count("request_resumed", "Finished requests that had lost a worker on the way.")
        success = count(
            "request_success", "Finished requests, by the reason of their end.", ("finished_reason",)
        )
        self.success = {reason: success.labels(name) for reason, name in FINISH_REASONS.items()}
        failures = count(
            "request_failures", "Requests that ended with an error, by gRPC's name of it.", ("code",)
        )
        self._failures = {code: failures.labels(code) for code in CODE_NAMES}

    @contextmanager
    def measured(self, deadline: Deadline) -> Iterator[Measure]:
        """Around the whole of one request. What is raised inside is its failure; leaving early a cancel."""
        try:
            yield Measure(self)
        except PdserveError as error:
            self._failures[error.code.name].inc()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._failures["DEADLINE_EXCEEDED" if deadline.has_passed else "CANCELLED"].inc()
            raise
        except Exception:
            self._failures["INTERNAL"].inc()
            raise


class Measure:
    """Of one request, all its sequences."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._received_at = time.monotonic()
        # When each sequence last had tokens, by its index.
        self._last_at: dict[int, float] = {}

    def note(self, output: Output) -> None:
        """As it goes out."""
        if isinstance(output, Delta):
            self._note_delta(output)
        elif isinstance(output, Started):
            self._note_start(output)
        else:
            self._note_end(output)

    def _note_delta(self, delta: Delta) -> None:
        now = time.monotonic()
        last = self._last_at.get(delta.index)
        if last is not None:
            self._metrics.itl.observe(now - last)
        self._last_at[delta.index] = now
        self._metrics.generation_tokens.inc(len(delta.piece.token_ids))

    def _note_start(self, started: Started) -> None:
        metrics = self._metrics
        metrics.ttft.observe(time.monotonic() - self._received_at)
        metrics.prompt_tokens.inc(started.prompt_tokens)
        metrics.prefix_queries.inc(started.prompt_tokens)
        metrics.prefix_hits.inc(started.cached_tokens)

    def _note_end(self, finished: Finished) -> None:
        metrics, usage, timings = self._metrics, finished.usage, finished.timings
        metrics.success[finished.ending.reason].inc()
        metrics.e2e.observe(time.monotonic() - self._received_at)
        metrics.request_prompt_tokens.observe(usage.prompt_tokens)
        metrics.request_generation_tokens.observe(usage.completion_tokens)
        metrics.queue.observe(timings.queue_ms / 1000)
        metrics.prefill.observe(timings.prefill_ms / 1000)
        metrics.decode.observe(timings.decode_ms / 1000)
        metrics.inference.observe(max(0.0, timings.ttft_ms - timings.queue_ms + timings.decode_ms) / 1000)
        if usage.completion_tokens > 1:
            metrics.tpot.observe(timings.mean_itl_ms / 1000)
        if finished.num_resumes:
            metrics.resumed.inc()
        self._note_phases(timings)
        self._note_hand_over(timings)

    def _note_phases(self, timings: Timings) -> None:
        metrics = self._metrics
        metrics.in_queue.observe((timings.queue_ms - timings.reserve_ms) / 1000)
        metrics.in_reserve.observe(timings.reserve_ms / 1000)
        metrics.in_prefill.observe(max(0.0, timings.ttft_ms - timings.queue_ms) / 1000)

    def _note_hand_over(self, timings: Timings) -> None:
        """Nothing of a request that its first token ended, or that one worker did alone."""
        metrics = self._metrics
        if timings.transfer_ms:
            metrics.kv_transfer.observe(timings.transfer_ms / 1000)
        if timings.decode_start_ms:
            metrics.kv_ready.observe(timings.handover_ms / 1000)
            metrics.decode_start.observe(timings.decode_start_ms / 1000)
