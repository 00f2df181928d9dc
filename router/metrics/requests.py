"""What clients feel, measured where they stand: at the router, on its own clock.

Of a request with n > 1 each sequence counts by itself, as with other servers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry

from router.deadline import Deadline
from router.failure import FAILURES, failure_of
from router.metrics.families import Counts, Felt, HandOvers, Phases
from router.outputs import Delta, Finished, Output, Started, Timings


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.felt = Felt(registry)
        self.phases = Phases(registry)
        self.handovers = HandOvers(registry)
        self.counts = Counts(registry)

    @contextmanager
    def measured(self, deadline: Deadline) -> Iterator[Measure]:
        """Around the whole of one request. What is raised inside is its failure; leaving early a cancel."""
        try:
            yield Measure(self)
        except FAILURES as error:
            self.counts.failed(failure_of(error, deadline).code)
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
            self._metrics.felt.itl.observe(now - last)
        self._last_at[delta.index] = now
        self._metrics.counts.generation_tokens.inc(len(delta.piece.token_ids))

    def _note_start(self, started: Started) -> None:
        counts = self._metrics.counts
        self._metrics.felt.ttft.observe(time.monotonic() - self._received_at)
        counts.prompt_tokens.inc(started.prompt_tokens)
        counts.prefix_queries.inc(started.prompt_tokens)
        counts.prefix_hits.inc(started.cached_tokens)

    def _note_end(self, finished: Finished) -> None:
        felt, counts, usage = self._metrics.felt, self._metrics.counts, finished.usage
        counts.finished(finished.ending.reason)
        counts.tokens_in.observe(usage.prompt_tokens)
        counts.tokens_out.observe(usage.completion_tokens)
        if finished.num_resumes:
            counts.resumed.inc()
        felt.e2e.observe(time.monotonic() - self._received_at)
        if usage.completion_tokens > 1:
            felt.tpot.observe(finished.timings.mean_itl_ms / 1000)
        self._note_phases(finished.timings)
        self._note_hand_over(finished.timings)

    def _note_phases(self, timings: Timings) -> None:
        phases = self._metrics.phases
        phases.queue.observe(timings.queue_ms / 1000)
        phases.prefill.observe(timings.prefill_ms / 1000)
        phases.decode.observe(timings.decode_ms / 1000)
        # The workers' share of the queueing is by another clock.
        to_first_ms = max(0.0, timings.ttft_ms - timings.queue_ms)
        phases.inference.observe((to_first_ms + timings.decode_ms) / 1000)
        phases.in_queue.observe((timings.queue_ms - timings.reserve_ms) / 1000)
        phases.in_reserve.observe(timings.reserve_ms / 1000)
        phases.in_prefill.observe(to_first_ms / 1000)

    def _note_hand_over(self, timings: Timings) -> None:
        """Nothing of a request that its first token ended, or that one worker did alone."""
        handovers = self._metrics.handovers
        if timings.transfer_ms:
            handovers.transfer.observe(timings.transfer_ms / 1000)
        if timings.decode_start_ms:
            handovers.ready.observe(timings.handover_ms / 1000)
            handovers.decode_start.observe(timings.decode_start_ms / 1000)
