"""Keys that were used or released: a hand-off works once, and a late word on an ended one is told so."""

from __future__ import annotations

from collections import OrderedDict

from kv_transfer.frame import TransferKey
from pdserve.v1.errors import FailedPrecondition

# Transfers that are remembered.
_MAX_TRANSFERS = 8192


class UsedKeys:
    """Of each transfer the newest epoch counts: older ones are used as well. Its owner's lock guards it."""

    def __init__(self) -> None:
        self._newest_epoch: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, key: TransferKey) -> bool:
        return key.epoch <= self._newest_epoch.get(key.transfer_id, -1)

    def require_unused(self, key: TransferKey) -> None:
        if key in self:
            raise FailedPrecondition(f"{key} was used before", reason="TRANSFER_ENDED")

    def add(self, key: TransferKey) -> None:
        newest = max(key.epoch, self._newest_epoch.pop(key.transfer_id, 0))
        self._newest_epoch[key.transfer_id] = newest
        while len(self._newest_epoch) > _MAX_TRANSFERS:
            self._newest_epoch.popitem(last=False)
