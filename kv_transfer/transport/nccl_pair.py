"""A pair between two GPUs, by NCCL: bytes go from one's memory to the other's, past both hosts.

Not verified: NCCL takes no two ranks on one GPU, and this project has had no machine with two. Who has one:
`benchmarks/nccl_pair.py`.

NCCL waits on GPUs, and for ever. So threads wait for an event behind the receive, with a timer of ours beside
it; when that runs out it aborts the communicator, which lets the event come to pass. For the watchdog of
torch, which would rather end the process, see `cluster/actors/actor_process.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch
from torch._C._distributed_c10d import Store

from kv_transfer.blocks import Cells, DeviceBlocks
from kv_transfer.transport.pair import D_RANK, P_RANK, Group, PairBroken, first_line


class NcclPair:
    is_in_place = False

    def __init__(self, store: Store, rank: int, blocks: DeviceBlocks, timeout_s: float) -> None:
        """Returns at once: the communicator is made by the first message. Raises PairBroken."""
        try:
            from torch._C._distributed_c10d import ProcessGroupNCCL  # a build for CPUs has none
        except ImportError:
            raise PairBroken("this build of torch has no NCCL") from None
        self._blocks = blocks
        self._peer = P_RANK if rank == D_RANK else D_RANK
        self._is_aborted = False
        self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._group = cast(Group, ProcessGroupNCCL(store, rank, 2, options))
        except RuntimeError as error:
            raise PairBroken(first_line(error)) from None

    def pieces(self, cells: Cells, neighbours: Sequence[int]) -> list[torch.Tensor]:
        self._stream.wait_stream(torch.cuda.default_stream(self._blocks.device))
        with torch.cuda.stream(self._stream):
            return [cells.gathered(self._blocks)]

    def send(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._move(pieces, is_send=True)
        return list(pieces)

    def receive(self, pieces: Sequence[torch.Tensor]) -> _NcclArrival:
        return _NcclArrival(self._move(pieces, is_send=False), self)

    def _move(self, pieces: Sequence[torch.Tensor], is_send: bool) -> torch.cuda.Event:
        """The event behind it. A `wait` here makes the stream wait, not the thread."""
        if self._is_aborted:
            raise PairBroken("it is closed")
        begin = self._group.send if is_send else self._group.recv
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.default_stream(self._blocks.device))
        try:
            with torch.cuda.stream(self._stream):
                for piece in pieces:
                    begin([piece], self._peer, 0).wait()
                done.record()
        except RuntimeError as error:
            raise PairBroken(first_line(error)) from None
        return done

    def abort(self) -> None:
        if not self._is_aborted:
            self._is_aborted = True
            self._group.abort()

    def close(self) -> None:
        self.abort()

    def require_whole(self) -> None:
        if self._is_aborted:
            raise PairBroken("it was aborted, or nothing came in time")


class _NcclArrival:
    def __init__(self, done: torch.cuda.Event, pair: NcclPair) -> None:
        self._done = done
        self._pair = pair

    def wait(self, timeout_s: float) -> None:
        timer = threading.Timer(timeout_s, self._pair.abort)
        timer.start()
        try:
            self._done.synchronize()
        except RuntimeError as error:
            raise PairBroken(first_line(error)) from None
        finally:
            timer.cancel()
            timer.join()
        self._pair.require_whole()
