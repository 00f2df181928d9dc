"""The sending process of `pdserve bench transfer`: `python -m pdserve.bench.sending_process SETTINGS`.

Settings, orders on stdin and answers on stdout are JSON, one line each; it ends when stdin closes. The first
line on stdin is the secret of the end that receives.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from engine.request import NewToken
from kv_transfer.blocks import HostBlocks
from kv_transfer.frame import TransferKey
from kv_transfer.layout import KVLayout
from kv_transfer.send_queue import SenderConfig
from kv_transfer.sender import Sender
from kv_transfer.transfer import PushTarget, Transfer
from kv_transfer.verify import Verify
from kv_transfer.ways import Way
from pdserve.bench.bare import BareSender, bare_sender
from pdserve.bench.child import told_trust
from pdserve.bench.transfer_ends import INSTANCE, LEASE_S, plain_blocks, sending_transport
from trust.trust import Trust

_FIRST = NewToken(position=0, token_id=1, logprobs=None)
_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    transport: str
    address: str
    nonce: str | None  # hex
    bare_port: int
    num_blocks: int  # of the pool from which all is sent
    layout: Mapping[str, str | int]

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @property
    def way(self) -> Way:
        return Way(self.transport, self.address, bytes.fromhex(self.nonce) if self.nonce else None)


class _Sending:
    def __init__(self, settings: Settings, trust: Trust) -> None:
        self._blocks = _filled(settings.num_blocks, KVLayout(**settings.layout))  # type: ignore[arg-type]
        self._way = settings.way
        self._transports = {settings.transport: sending_transport(settings.transport, trust, self._blocks)}
        # The one that was used last: what others have open would take part in what is measured.
        self._senders: dict[SenderConfig, Sender] = {}
        flat = self._blocks.array.reshape(-1)
        self._bare: BareSender = bare_sender(settings.transport, flat, settings.bare_port)

    def ship(self, names: list[str], num_blocks: int, at_once: bool, config: SenderConfig) -> list[float]:
        """All are open before the first has anything to send, as a prompt's is while it is computed. Seconds
        from there to D's word that it has everything: of each, one after the other, or of all together."""
        sender = self._sender(config)
        targets = [
            PushTarget(TransferKey(name, 0), INSTANCE, (self._way,), 0, num_blocks, LEASE_S) for name in names
        ]
        transfers = [sender.open(target) for target in targets]
        groups = [transfers] if at_once else [[each] for each in transfers]
        return [self._ship(group, num_blocks) for group in groups]

    def _sender(self, config: SenderConfig) -> Sender:
        if config not in self._senders:
            self._close_senders()
            blocks = self._blocks
            self._senders[config] = Sender(blocks.layout, blocks, self._transports, config)
        return self._senders[config]

    def _ship(self, transfers: list[Transfer], num_blocks: int) -> float:
        block_ids = tuple(range(num_blocks))
        num_tokens = num_blocks * self._blocks.layout.block_size
        began = time.perf_counter()
        for transfer in transfers:
            transfer.commit(block_ids, num_tokens, _FIRST)
        for transfer in transfers:
            transfer.done.result(_LIMIT_S)
        return time.perf_counter() - began

    def send_bare(self, num_bytes: int, count: int) -> list[float]:
        return [self._bare.send(num_bytes) for _ in range(count)]

    def close(self) -> None:
        self._close_senders()
        self._bare.close()

    def _close_senders(self) -> None:
        while self._senders:
            self._senders.popitem()[1].close()


def _config(fields: Mapping[str, int | None]) -> SenderConfig:
    return SenderConfig(
        frame_bytes=fields["frame_bytes"],
        window_bytes=fields["window_bytes"],
        num_channels=fields["num_channels"] or 1,
        verify=None if (verify := fields["verify"]) is None else Verify(verify),
    )


def _filled(num_blocks: int, layout: KVLayout) -> HostBlocks:
    blocks = plain_blocks(num_blocks, layout)
    blocks.array[:] = np.random.default_rng(0).integers(0, 256, blocks.array.shape, np.uint8)
    return blocks


def _serve(settings: Settings) -> Iterator[list[float]]:
    sending = _Sending(settings, told_trust())
    yield []
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "ship":
            config = _config(order["sender"])
            yield sending.ship(order["names"], order["num_blocks"], order["at_once"], config)
        else:
            yield sending.send_bare(order["num_bytes"], order["count"])
    sending.close()


def main() -> None:
    for seconds in _serve(Settings(**json.loads(sys.argv[1]))):
        sys.stdout.write(json.dumps(seconds) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
