"""Two processes and a process group of torch.distributed that is theirs alone: P sends bytes to D by it.

The group is made from its parts, a TCPStore and a ProcessGroupGloo or ProcessGroupNCCL. Nothing of it is
global to the process, which may have many, and nothing is left of it after `close`: no thread, no port.

What is sent is received in order, piece by piece. D says how a frame is cut: where its blocks lie together in
its memory they are one piece, and if pieces would be too small, all is one. A receive of another size than
what comes ends D's process, not only the pair; so both ends compare the size of a layer before they pair.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store, TCPStore, Work

from kv_transfer.blocks import Cells, HostBlocks, parts

# D hosts the store, and P joins it.
D_RANK, P_RANK = 0, 1
# Pieces of at least this size, on average, go from where they lie to where they belong; smaller ones go all
# together, by way of buffers: below it messages cost more than copies.
STRAIGHT_BYTES = 128 * 1024


class Group(Protocol):
    """What both kinds of process group offer; torch's stubs do not say so."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


class PairBroken(Exception):
    """No bytes go by this pair any more; says why."""


class Sent(Protocol):
    """Keeps what is being sent; to be dropped when it has arrived."""


class Arrival(Protocol):
    def wait(self, timeout_s: float) -> None:
        """Sleeps until the bytes are there. Raises PairBroken."""
        ...


class Pair(Protocol):
    """One end. One thread at a time sends, or receives; `abort` may come from any."""

    @property
    def is_in_place(self) -> bool:
        """Whether it can receive into blocks, piece by piece. Otherwise all of a frame is one piece."""
        ...

    def pieces(self, cells: Cells, neighbours: Sequence[int]) -> list[torch.Tensor]:
        """What P sends of a frame, cut as D's blocks lie (`kv_transfer.blocks.neighbours`), or not cut."""
        ...

    def send(self, pieces: Sequence[torch.Tensor]) -> Sent:
        """Begins it. The pieces stay as they are until D has them. Raises PairBroken."""
        ...

    def receive(self, pieces: Sequence[torch.Tensor]) -> Arrival:
        """Begins it. Raises PairBroken."""
        ...

    def abort(self) -> None:
        """Ends what waits, here and there: nothing is read or written by this pair any more."""
        ...

    def close(self) -> None:
        """Idempotent; nobody may be inside. What `send` and `receive` gave is to be dropped, too."""
        ...


def listen(host: str, timeout_s: float) -> tuple[Store, int]:
    """D's end of a store, on `host` only, and its port. Raises PairBroken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen()
            port = int(listener.getsockname()[1])
            limit = timedelta(seconds=timeout_s)
            fd = listener.detach()  # the store's from here on
            store = TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=fd)
    except (OSError, RuntimeError) as error:
        raise PairBroken(f"no store on {host}: {first_line(error)}") from None
    return store, port


def join(host: str, port: int, timeout_s: float) -> Store:
    """P's end. Raises PairBroken where D does not answer in time."""
    try:
        return TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        raise PairBroken(first_line(error)) from None


def own_address_towards(host: str) -> str:
    """By which of this machine's addresses that host is reached."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # connecting a datagram socket sends nothing
        probe.connect(address)
        return str(probe.getsockname()[0])


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class GlooPair:
    """Between host memories, by TCP. A thread of Gloo's moves the bytes; it wakes up 100 times a second."""

    is_in_place = True
    # Of a message that is never sent.
    _NO_TAG = 2**31 - 1

    def __init__(self, store: Store, rank: int, host: str, timeout_s: float) -> None:
        """Both ends at the same time; `host` is the address of this one. Raises PairBroken."""
        self._peer = P_RANK if rank == D_RANK else D_RANK
        self._tags = count()
        self._group: Group | None = None
        try:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lag behind
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            options._threads = 1
            options._timeout = timedelta(seconds=timeout_s)
            self._group = cast(Group, ProcessGroupGloo(store, rank, 2, options))
        except RuntimeError as error:
            raise PairBroken(first_line(error)) from None

    def pieces(self, cells: Cells, neighbours: Sequence[int]) -> list[torch.Tensor]:
        num_blocks = len(cells.block_ids)
        if neighbours and sum(abs(length) for length in neighbours) != num_blocks:
            raise PairBroken(f"{num_blocks} blocks were announced, and a receive is posted for others")
        return [_piece(cells, indices) for indices in parts(range(num_blocks), neighbours or [num_blocks])]

    def send(self, pieces: Sequence[torch.Tensor]) -> list[Work]:
        group = self._living()
        try:
            return [group.send([piece], self._peer, self._next_tag()) for piece in pieces]
        except RuntimeError as error:
            raise PairBroken(first_line(error)) from None

    def receive(self, pieces: Sequence[torch.Tensor]) -> _GlooArrival:
        group = self._living()
        try:
            return _GlooArrival([group.recv([piece], self._peer, self._next_tag()) for piece in pieces])
        except RuntimeError as error:
            raise PairBroken(first_line(error)) from None

    def abort(self) -> None:
        """Gloo's own way: a wait that runs out closes the connection, and ends all others here and there."""
        group = self._group
        if group is None:
            return
        nowhere = torch.empty(1, dtype=torch.uint8)
        try:
            group.recv([nowhere], self._peer, self._NO_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass  # which is what was wanted

    def close(self) -> None:
        self.abort()
        self._group = None

    def _living(self) -> Group:
        if self._group is None:
            raise PairBroken("it is closed")
        return self._group

    def _next_tag(self) -> int:
        return next(self._tags) % self._NO_TAG


def _piece(cells: Cells, indices: Sequence[int]) -> torch.Tensor:
    """A copy only where the blocks do not lie together here, or the last one is not written to its end."""
    block_ids = [cells.block_ids[index] for index in indices]
    store, last = cells.store, len(cells.block_ids) - 1
    is_as_it_lies = cells.num_tail_tokens is None or last not in indices
    if is_as_it_lies and isinstance(store, HostBlocks) and store.is_stretch(block_ids, cells.layers):
        return torch.frombuffer(store.stretch(block_ids, cells.layers), dtype=torch.uint8)
    pieces = [torch.frombuffer(cells.pieces[index], dtype=torch.uint8) for index in indices]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class _GlooArrival:
    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout_s: float) -> None:
        """Without the GIL. A wait that runs out breaks the pair. The last piece comes last: one sleep."""
        try:
            for work in reversed(self._works):
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PairBroken(first_line(error)) from None
        finally:
            self._works.clear()
