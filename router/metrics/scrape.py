"""The cluster's one scrape address: the router's own metrics, and those that its workers tell when asked."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from pdserve.v1.errors import PdserveError
from router.dispatch import Dispatcher
from router.fleet.worker import Worker
from router.fleet.workers import WorkerTable
from router.metrics.exposition import Exposition
from router.metrics.requests import RequestMetrics
from router.metrics.tables import TableMetrics

logger = logging.getLogger(__name__)

# Prometheus gives a scrape 10 s by default: a worker that is stopped must not cost it the others' metrics.
TIMEOUT_S = 2.0


class RouterMetrics:
    def __init__(self, model: str, router_id: str, table: WorkerTable, dispatcher: Dispatcher) -> None:
        self._model = model
        self._router_id = router_id
        self._table = table
        self._registry = CollectorRegistry()
        self.requests = RequestMetrics(self._registry)
        self._registry.register(TableMetrics(table, dispatcher))
        ProcessCollector(registry=self._registry)

    async def exposition(self) -> str:
        """Of the whole cluster, in the text format. Every sample says model_name, role and worker."""
        # A new process takes its predecessor's place, and that may be there still: two of one name would be
        # twice the same sample.
        workers = {worker.info.id: worker for worker in self._table.all()}.values()
        answers = await asyncio.gather(*map(_ask, workers))
        whole = Exposition()
        own = generate_latest(self._registry).decode()
        whole.add(own, self._labels("router", self._router_id))
        for worker, answer in zip(workers, answers, strict=True):
            labels = self._labels(worker.info.role.name.lower(), worker.info.id)
            whole.add(_up(answer is not None), labels)
            whole.add(answer or "", labels)
        return whole.render()

    def _labels(self, role: str, worker: str) -> dict[str, str]:
        return {"model_name": self._model, "role": role, "worker": worker}


async def _ask(worker: Worker) -> str | None:
    """None: it told nothing in time."""
    if not worker.is_connected:
        return None
    answer = await worker.run(worker.metrics(TIMEOUT_S), "metrics")
    if isinstance(answer, PdserveError):
        logger.info("no metrics of worker=%s: %s", worker.info.id, answer.message)
        return None
    return answer.decode(errors="replace")


def _up(is_up: bool) -> str:
    return (
        "# HELP pdserve_worker_up Whether a worker told its metrics at this scrape.\n"
        "# TYPE pdserve_worker_up gauge\n"
        f"pdserve_worker_up {int(is_up)}\n"
    )
