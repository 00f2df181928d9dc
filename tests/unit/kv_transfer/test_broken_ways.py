from __future__ import annotations

from kv_transfer.broken_ways import MAX_PAUSE_S, BrokenWays
from tests.unit.kv_transfer.test_reservation import Clock


def test_a_way_that_breaks_is_avoided_for_longer_each_time() -> None:
    clock = Clock()
    broken = BrokenWays(10.0, clock)
    assert not broken.is_avoided("d", "collective")
    for pause_s in (10.0, 20.0, 40.0):
        broken.add("d", "collective")
        clock.now += pause_s - 0.1
        assert broken.is_avoided("d", "collective")
        assert not broken.is_avoided("d", "grpc")
        assert not broken.is_avoided("another", "collective")
        clock.now += 0.2
        assert not broken.is_avoided("d", "collective")


def test_it_is_never_given_up_for_good() -> None:
    clock = Clock()
    broken = BrokenWays(10.0, clock)
    for _ in range(100):
        broken.add("d", "collective")
    clock.now += MAX_PAUSE_S + 0.1
    assert not broken.is_avoided("d", "collective")
