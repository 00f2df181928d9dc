"""What a worker measures, in Prometheus' text format: its own report as families, and the engine's steps.

Which worker says so is not among the labels: the router adds that. Labels are bounded: states, transports
and directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from engine.request import StepResult
from pdserve.v1 import cluster_pb2

_STEP_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_STEP_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class WorkerMetrics:
    """`describe` gives the worker's report of now. Thread-safe as far as that is."""

    def __init__(self, describe: Callable[[], cluster_pb2.WorkerStatus]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Report(describe))
        ProcessCollector(registry=self._registry)
        self._step_seconds = Histogram(
            "pdserve_engine_step_seconds",
            "One step of the engine: a batch scheduled, computed and sampled.",
            buckets=_STEP_SECONDS,
            registry=self._registry,
        )
        self._step_sequences = Histogram(
            "pdserve_engine_step_sequences",
            "Sequences in one step of the engine.",
            buckets=_STEP_SEQUENCES,
            registry=self._registry,
        )

    def note_step(self, result: StepResult) -> None:
        self._step_seconds.observe(result.step_ms / 1000)
        self._step_sequences.observe(len(result.outputs))

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class _Report(Collector):
    def __init__(self, describe: Callable[[], cluster_pb2.WorkerStatus]) -> None:
        self._describe = describe

    def collect(self) -> Iterator[Metric]:
        status = self._describe()
        yield from _load(status)
        yield from _blocks(status)
        yield from _counters(status.counters)
        yield from _transfers(status)


def _load(status: cluster_pb2.WorkerStatus) -> Iterator[Metric]:
    load = status.load
    yield _gauge("num_sequences_running", "Sequences in the engine's batch.", load.num_running)
    yield _gauge(
        "num_sequences_waiting", "Sequences accepted and not running, preempted ones too.", load.num_waiting
    )
    yield _gauge(
        "queued_prompt_tokens", "Prompt tokens accepted and not computed yet.", load.queued_prompt_tokens
    )
    yield _gauge("num_reservations", "Reservations whose KV is not all here.", load.num_reservations)
    yield _gauge(
        "num_transfers", "Prompts whose blocks are still held here for a hand-over.", load.num_transfers
    )


def _blocks(status: cluster_pb2.WorkerStatus) -> Iterator[Metric]:
    load, total = status.load, status.limits.kv_blocks_total
    usage = load.kv_blocks_used / total if total else 0.0
    yield _gauge("kv_cache_usage_perc", "Share of the KV pool's blocks in use. 1 means all.", usage)
    blocks = GaugeMetricFamily(
        "pdserve_kv_blocks",
        "The KV pool's blocks: free or only cached; used by a sequence, a transfer or a reservation; "
        "in quarantine, where a sender might still write.",
        labels=["state"],
    )
    blocks.add_metric(["free"], load.kv_blocks_free)
    blocks.add_metric(["used"], load.kv_blocks_used - load.kv_blocks_quarantined)
    blocks.add_metric(["quarantined"], load.kv_blocks_quarantined)
    yield blocks
    oldest_ms = max((each.age_ms for each in status.quarantines), default=0)
    yield _gauge(
        "kv_quarantine_age_seconds",
        "Of the oldest blocks in quarantine; 0: there are none.",
        oldest_ms / 1000,
    )


def _counters(counters: cluster_pb2.WorkerCounters) -> Iterator[Metric]:
    yield _counter(
        "prefilled_tokens",
        "Prompt tokens computed, those of resumed and preempted sequences too.",
        counters.tokens_prefilled,
    )
    yield _counter("decoded_tokens", "Tokens decoded.", counters.tokens_decoded)
    yield _counter(
        "num_preemptions", "Sequences that gave up their blocks to others.", counters.num_preemptions
    )
    yield _counter("expired_leases", "Reservations that ended for want of news.", counters.num_expired_leases)
    yield _counter("spec_decode_num_draft_tokens", "Tokens guessed and computed.", counters.draft_tokens)
    yield _counter(
        "spec_decode_num_accepted_tokens", "Guessed tokens that were right.", counters.accepted_draft_tokens
    )


def _transfers(status: cluster_pb2.WorkerStatus) -> Iterator[Metric]:
    is_sender = status.role == cluster_pb2.ROLE_PREFILL
    direction = "sent" if is_sender else "received"
    way = ["transport", "direction"]
    nbytes = CounterMetricFamily(
        "pdserve_kv_transfer_bytes", "KV of hand-overs that arrived whole.", labels=way
    )
    seconds = SummaryMetricFamily(
        "pdserve_kv_transfer_seconds",
        "A hand-over: first block pushed → commit acknowledged (sent), opened → all KV is here (received).",
        labels=way,
    )
    hidden = CounterMetricFamily(
        "pdserve_kv_transfer_hidden_bytes",
        "Of the bytes sent: those that were there when the first token was drawn.",
        labels=["transport"],
    )
    ready = SummaryMetricFamily(
        "pdserve_kv_handover_seconds", "First token drawn → all KV is here.", labels=["transport"]
    )
    start = SummaryMetricFamily(
        "pdserve_kv_decode_start_seconds",
        "First token drawn → first step of decoding began.",
        labels=["transport"],
    )
    for each in status.counters.transfers:
        nbytes.add_metric([each.transport, direction], each.num_bytes)
        seconds.add_metric([each.transport, direction], each.num_transfers, each.transfer_ms / 1000)
        if is_sender:
            hidden.add_metric([each.transport], each.hidden_bytes)
        else:
            ready.add_metric([each.transport], each.num_started, each.handover_ms / 1000)
            start.add_metric([each.transport], each.num_started, each.decode_start_ms / 1000)
    yield from (nbytes, seconds, hidden, ready, start)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"pdserve_{name}", help, value=value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"pdserve_{name}", help, value=value)
