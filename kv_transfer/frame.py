"""What travels on a Push stream: `u32 header length (little endian) | msgpack header | raw payload`.

P → D   Open     seq 0; names D's process, the layout and how much is to be checked; D's ack allows P to write
        Blocks   seq 1..n; layers [first_layer, first_layer + num_layers) of the sequence's blocks
                 [first_block, first_block + num_blocks) as payload, block after block; without a payload
                 where P's process has written them into D's memory by itself
        Commit   seq n+1; the first token and the digest over the checksums of all Blocks frames
        Renew    no seq of its own (repeats the last one sent): P is alive, its prompt still waits
        Abort    P will not commit; not answered
        Closed   no thread of P will touch the reservation's blocks again; not answered
D → P   Ack      the frame with this seq is applied; the ack of an Open tells a remote writer where to write
        Refused  it is not, and the transfer is over; code is a google.rpc.Code

How these become bytes: `codec.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.request import NewToken
from kv_transfer.layout import KVLayout
from kv_transfer.verify import Verify

# What payloads are cut to, unless a single piece of a block is larger: those in a frame, and those that go
# on a way of their own.
MAX_FRAME_BYTES = 4 * 1024 * 1024
MAX_APART_BYTES = 64 * 1024 * 1024


def cut(told: str, length: int = 64) -> str:
    """What a peer has told, for a log."""
    return told if len(told) <= length else f"{told[:length]}…"


@dataclass(frozen=True, slots=True)
class TransferKey:
    """One attempt at handing one sequence over. The router makes both parts."""

    transfer_id: str
    epoch: int

    def __str__(self) -> str:
        """For people: a long id is cut short."""
        return f"{cut(self.transfer_id)}/{self.epoch}"

    @property
    def log_ids(self) -> dict[str, object]:
        return {"transfer_id": cut(self.transfer_id), "epoch": self.epoch}


@dataclass(frozen=True, slots=True)
class Open:
    """`is_remote_writer`: P's process will write D's memory by itself."""

    kind: ClassVar[int] = 1
    key: TransferKey
    instance_id: str
    transport: str
    layout: KVLayout
    num_blocks: int
    num_cached_blocks: int
    verify: Verify
    is_remote_writer: bool = False

    @property
    def seq(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """`checksum` is 0 where nothing is verified."""

    kind: ClassVar[int] = 2
    key: TransferKey
    seq: int
    first_block: int
    num_blocks: int
    first_layer: int
    num_layers: int
    checksum: int

    @property
    def blocks(self) -> range:
        return range(self.first_block, self.first_block + self.num_blocks)

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)


@dataclass(frozen=True, slots=True)
class Commit:
    kind: ClassVar[int] = 3
    key: TransferKey
    seq: int
    num_blocks: int
    digest: int
    first: NewToken
    # When `first` was drawn, by the clock of P's node.
    sampled_at_unix_ns: int


@dataclass(frozen=True, slots=True)
class Renew:
    kind: ClassVar[int] = 4
    key: TransferKey
    seq: int


@dataclass(frozen=True, slots=True)
class Abort:
    kind: ClassVar[int] = 5
    key: TransferKey
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    kind: ClassVar[int] = 6
    key: TransferKey


@dataclass(frozen=True, slots=True)
class Ack:
    """`block_ids`: the blocks of D's pool that are not cached; only for a remote writer's Open."""

    kind: ClassVar[int] = 7
    key: TransferKey
    seq: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    kind: ClassVar[int] = 8
    key: TransferKey
    seq: int
    code: int
    reason: str
    message: str


Header = Open | Blocks | Commit | Renew | Abort | Closed | Ack | Refused
