"""The conversation trace as a load: true lengths, clipped, and the shape of its arrivals at any rate."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.disagg_vs_colocated.settings import (
    MAX_PROMPT_TOKENS,
    MAX_TOKENS,
    TRACE_START_S,
    Wanted,
)
from pdserve.bench.serve.trace import Trace, read_trace
from pdserve.bench.serve.workload import Limits, PlannedRequest, Workload
from pdserve.bench.serve.workloads import conversation_trace, trace_workload


class TraceLoad:
    """Raises BenchError where the file cannot be read or is too short."""

    def __init__(self, wanted: Wanted) -> None:
        num_requests = wanted.sizes.num_requests
        self._trace: Trace = conversation_trace(num_requests)
        if wanted.trace is not None:
            self._trace = read_trace(wanted.trace).window(TRACE_START_S, num_requests)
        self.name = self._trace.name

    @property
    def lengths(self) -> list[int]:
        """Of the prompts."""
        return [min(row.num_prompt_tokens, MAX_PROMPT_TOKENS) for row in self._trace.rows]

    def outlined(self, rate: float) -> tuple[PlannedRequest, ...]:
        """The same requests without their prompts' tokens, for who reads lengths and times only."""
        outline = (
            PlannedRequest(row.at_s, (), min(row.num_tokens, MAX_TOKENS), length)
            for row, length in zip(self._trace.rows, self.lengths, strict=True)
        )
        begin_s = self._trace.rows[0].at_s
        begun = tuple(replace(each, at_s=each.at_s - begin_s) for each in outline)
        return Workload(self.name, begun).at_rate(rate).requests

    def at(self, rate: float, vocab_size: int, seed: int) -> Workload:
        """`seed` draws the prompts' tokens; lengths and arrivals are the trace's."""
        limits = Limits(MAX_PROMPT_TOKENS, MAX_TOKENS)
        return trace_workload(self._trace, limits=limits, vocab_size=vocab_size, seed=seed).at_rate(rate)
