"""A worker's report and steps become families that Prometheus reads."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.request import SequenceOutput, StepResult
from pdserve.v1 import cluster_pb2
from worker.metrics import WorkerMetrics

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def status(role: cluster_pb2.Role, **load: int) -> cluster_pb2.WorkerStatus:
    counters = cluster_pb2.WorkerCounters(
        tokens_prefilled=100,
        tokens_decoded=200,
        num_preemptions=3,
        num_expired_leases=4,
        draft_tokens=50,
        accepted_draft_tokens=20,
        transfers=[
            cluster_pb2.TransferCounters(
                transport="shm",
                num_transfers=2,
                num_bytes=4096,
                transfer_ms=500,
                hidden_bytes=1024,
                num_started=1,
                handover_ms=30,
                decode_start_ms=40,
            )
        ],
    )
    return cluster_pb2.WorkerStatus(
        id="w-0",
        role=role,
        limits=cluster_pb2.WorkerLimits(kv_blocks_total=40),
        load=cluster_pb2.WorkerLoad(**load),
        counters=counters,
        quarantines=[
            cluster_pb2.Quarantine(sender_pid=1, num_blocks=1, age_ms=250),
            cluster_pb2.Quarantine(sender_pid=2, num_blocks=1, age_ms=1500),
        ],
    )


def samples(metrics: WorkerMetrics) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
    }


def test_the_load_is_told_as_of_the_scrape() -> None:
    told = status(
        cluster_pb2.ROLE_DECODE,
        num_running=5,
        num_waiting=1,
        kv_blocks_free=28,
        kv_blocks_used=12,
        kv_blocks_quarantined=2,
        num_reservations=3,
    )
    metrics = WorkerMetrics(lambda: told)
    seen = samples(metrics)
    assert seen["pdserve_num_sequences_running", ()] == 5
    assert seen["pdserve_num_sequences_waiting", ()] == 1
    assert seen["pdserve_num_reservations", ()] == 3
    assert seen["pdserve_kv_cache_usage_perc", ()] == pytest.approx(0.3)
    blocks = {
        state: seen["pdserve_kv_blocks", (("state", state),)] for state in ("free", "used", "quarantined")
    }
    assert blocks == {"free": 28, "used": 10, "quarantined": 2}
    assert seen["pdserve_kv_quarantine_age_seconds", ()] == 1.5
    told.load.num_running = 6
    assert samples(metrics)["pdserve_num_sequences_running", ()] == 6


def test_counts_are_counters_in_base_units() -> None:
    seen = samples(WorkerMetrics(lambda: status(cluster_pb2.ROLE_DECODE)))
    way = (("direction", "received"), ("transport", "shm"))
    shm = (("transport", "shm"),)
    assert seen["pdserve_prefilled_tokens_total", ()] == 100
    assert seen["pdserve_decoded_tokens_total", ()] == 200
    assert seen["pdserve_num_preemptions_total", ()] == 3
    assert seen["pdserve_expired_leases_total", ()] == 4
    assert seen["pdserve_spec_decode_num_draft_tokens_total", ()] == 50
    assert seen["pdserve_spec_decode_num_accepted_tokens_total", ()] == 20
    assert seen["pdserve_kv_transfer_bytes_total", way] == 4096
    assert seen["pdserve_kv_transfer_seconds_sum", way] == 0.5
    assert seen["pdserve_kv_transfer_seconds_count", way] == 2
    assert seen["pdserve_kv_handover_seconds_sum", shm] == 0.03
    assert seen["pdserve_kv_decode_start_seconds_sum", shm] == 0.04
    assert seen["pdserve_kv_decode_start_seconds_count", shm] == 1
    assert not [name for name, _ in seen if name.startswith("pdserve_kv_transfer_hidden")]


def test_a_sender_tells_what_it_hid_and_no_start_of_decoding() -> None:
    seen = samples(WorkerMetrics(lambda: status(cluster_pb2.ROLE_PREFILL)))
    assert seen["pdserve_kv_transfer_bytes_total", (("direction", "sent"), ("transport", "shm"))] == 4096
    assert seen["pdserve_kv_transfer_hidden_bytes_total", (("transport", "shm"),)] == 1024
    assert not [
        name for name, _ in seen if name.startswith(("pdserve_kv_handover", "pdserve_kv_decode_start"))
    ]


def test_steps_are_histograms() -> None:
    metrics = WorkerMetrics(lambda: status(cluster_pb2.ROLE_DECODE))
    output = SequenceOutput("a", 1, (), None, is_last=False)
    metrics.note_step(StepResult((output, output), 30.0))
    metrics.note_step(StepResult((output,), 90.0))
    seen = samples(metrics)
    assert seen["pdserve_engine_step_seconds_count", ()] == 2
    assert seen["pdserve_engine_step_seconds_sum", ()] == pytest.approx(0.12)
    assert seen["pdserve_engine_step_seconds_bucket", (("le", "0.04"),)] == 1
    assert seen["pdserve_engine_step_sequences_sum", ()] == 3
