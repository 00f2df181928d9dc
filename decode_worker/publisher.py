"""Who reads this worker's tokens, and what each of them is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from decode_worker.subscription import StepBatch, StepFailure, Subscription
from kv_transfer.frame import TransferKey
from pdserve.v1.errors import Aborted, PdserveError

log = logging.getLogger(__name__)


class Publisher:
    """Used on the asyncio loop only. `on_gone(router_id)`: nobody reads for that router any more."""

    def __init__(self, max_pending: int, on_gone: Callable[[str], None]) -> None:
        self._max_pending = max_pending
        self._on_gone = on_gone
        self._subscriptions: dict[str, Subscription] = {}

    def __contains__(self, router_id: str) -> bool:
        return router_id in self._subscriptions

    def subscribe(self, router_id: str) -> Subscription:
        """The load comes at once. A second one of the same router ends the first."""
        older = self._subscriptions.get(router_id)
        if older is not None:
            self.unsubscribe(older)
            older.cut(Aborted(f"router {router_id} subscribed again", reason="SUBSCRIBED_AGAIN"))
        subscription = Subscription(router_id, self._max_pending)
        self._subscriptions[router_id] = subscription
        subscription.put(StepBatch())
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Idempotent."""
        if self._subscriptions.get(subscription.router_id) is subscription:
            del self._subscriptions[subscription.router_id]
            self._on_gone(subscription.router_id)

    def tell(self, router_id: str, batch: StepBatch) -> None:
        subscription = self._subscriptions.get(router_id)
        if subscription is not None and not subscription.put(batch):
            log.warning("cut off router=%s: it does not read", router_id)
            self.unsubscribe(subscription)

    def tell_failure(self, router_id: str, key: TransferKey, error: PdserveError) -> None:
        self.tell(router_id, StepBatch(failures=[StepFailure(key, error)]))

    def tell_step(self, batches: Mapping[str, StepBatch], is_load_news: bool) -> None:
        """Each router its share of a step; with `is_load_news` the others at least the load."""
        for router_id in list(self._subscriptions):
            batch = batches.get(router_id)
            if batch is not None or is_load_news:
                self.tell(router_id, batch or StepBatch())

    def finish(self, error: PdserveError) -> None:
        """Every stream ends behind what it still holds."""
        for subscription in self._subscriptions.values():
            subscription.finish(error)
