"""When a sequence was whole on D, and when its first step began: measured from P's drawing of its token."""

from __future__ import annotations

from engine.request import NewToken, SequenceOutput, StepResult
from engine.reservations import BlockReservation
from kv_transfer.counters import TransferCounts, TransportCounters
from kv_transfer.frame import TransferKey
from kv_transfer.handover import HandOver, HandOvers
from kv_transfer.reservation import Reservation

MS = 1_000_000


def arrived(sampled_at_ms: int, ready_at_ms: int, transport: str = "grpc") -> Reservation:
    made = Reservation(TransferKey("a", 0), BlockReservation(1, (1,), 0, 4, False), 2, 1.0, 0.0)
    made.transport = transport
    made.sampled_at_unix_ns, made.ready_at_unix_ns = sampled_at_ms * MS, ready_at_ms * MS
    return made


def step(*names: str, step_ms: float = 10.0) -> StepResult:
    token = (NewToken(1, 5, None),)
    return StepResult(tuple(SequenceOutput(name, 9, token, None, False) for name in names), step_ms)


def test_the_first_step_begins_where_its_length_ago_was() -> None:
    counters = TransportCounters()
    handovers = HandOvers(counters)
    handovers.joined("a", arrived(1000, 1004))
    handovers.joined("b", arrived(1000, 1005, "shm"))
    assert handovers.stepped(step("other", "a"), 1020 * MS) == {"a": HandOver(4.0, 10.0)}
    assert handovers.stepped(step("other", "a", "b"), 1030 * MS) == {"b": HandOver(5.0, 20.0)}
    assert handovers.stepped(step("other", "a", "b"), 1040 * MS) == {}
    assert counters.copy() == {
        "grpc": TransferCounts(num_started=1, handover_ms=4.0, decode_start_ms=10.0),
        "shm": TransferCounts(num_started=1, handover_ms=5.0, decode_start_ms=20.0),
    }


def test_a_sequence_that_left_before_its_step_is_forgotten() -> None:
    counters = TransportCounters()
    handovers = HandOvers(counters)
    handovers.joined("a", arrived(1000, 1004))
    handovers.left("a")
    handovers.left("a")
    assert handovers.stepped(step("a"), 1020 * MS) == {}
    assert counters.copy() == {}


def test_clocks_that_differ_give_no_negative_times() -> None:
    handovers = HandOvers(TransportCounters())
    handovers.joined("a", arrived(5000, 1004))
    assert handovers.stepped(step("a"), 1020 * MS) == {"a": HandOver(0.0, 0.0)}


def test_counts_add_up_by_field() -> None:
    counters = TransportCounters()
    for _ in range(2):
        counters.add("grpc", TransferCounts(1, 10, 2.5, 4))
    assert counters.copy() == {"grpc": TransferCounts(2, 20, 5.0, 8)}
