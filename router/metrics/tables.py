"""What the router's own tables say at the moment of a scrape: the queue, the pools, what was lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dispatch import Dispatcher
from router.fleet.worker_info import WorkerState
from router.fleet.workers import WorkerTable


class TableMetrics(Collector):
    def __init__(self, table: WorkerTable, dispatcher: Dispatcher) -> None:
        self._table = table
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._pools()

    def _requests(self) -> Iterator[Metric]:
        dispatcher = self._dispatcher
        num_waiting = dispatcher.admission.num_waiting
        yield GaugeMetricFamily(
            "pdserve_num_requests_running",
            "Requests that have left the router's queue and not ended.",
            value=dispatcher.num_in_flight - num_waiting,
        )
        yield GaugeMetricFamily(
            "pdserve_num_requests_waiting", "Requests in the router's queue.", value=num_waiting
        )
        yield CounterMetricFamily(
            "pdserve_request_resumes",
            "Attempts that lost a worker, and were made again elsewhere.",
            value=dispatcher.num_resumes,
        )
        yield CounterMetricFamily(
            "pdserve_request_moves",
            "Attempts whose worker left, or gave no sign of life, and that were made again elsewhere.",
            value=dispatcher.num_moves,
        )
        yield CounterMetricFamily(
            "pdserve_slow_readers",
            "Requests that were cut off since their clients were furthest behind with reading.",
            value=dispatcher.slow_readers.num_cut,
        )
        yield CounterMetricFamily(
            "pdserve_reservations_refused",
            "Attempts that found no room on any decode worker, and waited again.",
            value=dispatcher.num_refusals,
        )

    def _pools(self) -> Iterator[Metric]:
        """Every state of every pool, so that one that empties says 0."""
        table = self._table
        yield GaugeMetricFamily(
            "pdserve_serving", "1 while a request that came now could be served.", value=table.is_serving
        )
        workers = GaugeMetricFamily(
            "pdserve_pool_workers",
            "Workers that this router knows, by the controller's word of their state.",
            labels=["pool", "state"],
        )
        targets = GaugeMetricFamily(
            "pdserve_pool_target_workers", "Workers that a pool is to have.", labels=["pool"]
        )
        counts = Counter((worker.info.role, worker.state) for worker in table.all())
        for role, target in table.targets.items():
            name = role.name.lower()
            targets.add_metric([name], target)
            for state in WorkerState:
                workers.add_metric([name, state.name.lower()], counts[role, state])
        yield from (workers, targets)
