"""Raw rates: blocks of a pool go to another process by the real sender and receiver, and in turn with them
the same number of bytes by the bare medium.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median

from kv_transfer.layout import KVLayout
from kv_transfer.send_queue import SenderConfig
from kv_transfer.verify import Verify
from pdserve.bench.bare import RECEIVERS, BareReceiver
from pdserve.bench.child import trusted_child
from pdserve.bench.errors import BenchError
from pdserve.bench.sending_process import Settings
from pdserve.bench.transfer_ends import ReceivingEnd
from trust.trust import Trust

# Transfers of one size in a round, one after the other; bare ones likewise.
NUM_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class RawResult:
    transport: str
    num_tokens: int
    bytes_s: float
    bare_bytes_s: float

    @property
    def share(self) -> float:
        return self.bytes_s / self.bare_bytes_s


class RawBench:
    """One transport between this process, which receives, and another one."""

    def __init__(
        self, end: ReceivingEnd, bare: BareReceiver, process: subprocess.Popen[str], layout: KVLayout
    ) -> None:
        self._end = end
        self._bare = bare
        self._process = process
        self._layout = layout
        self._next_block = 0
        self._answer()  # it is ready

    def ship_s(
        self, num_blocks: int, count: int, at_once: bool = False, config: SenderConfig | None = None
    ) -> list[float]:
        """Seconds of so many transfers, or of all together."""
        keys = []
        for _ in range(count):
            keys.append(self._end.reserve(num_blocks, self._next_block))
            self._next_block += num_blocks
        names = [key.transfer_id for key in keys]
        order = {"do": "ship", "names": names, "num_blocks": num_blocks, "at_once": at_once}
        self._order({**order, "sender": asdict(replace(config or SenderConfig(), verify=Verify.OFF))})
        seconds = self._answer()
        for key in keys:
            self._end.table.release(key)
        return seconds

    def bare_s(self, num_blocks: int, count: int) -> list[float]:
        num_bytes = num_blocks * self._layout.block_bytes
        self._order({"do": "bare", "num_bytes": num_bytes, "count": count})
        self._bare.take(num_bytes, count)
        return self._answer()

    def _order(self, order: Mapping[str, object]) -> None:
        if self._process.stdin is None:
            raise ValueError("its pipes are needed")
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchError("the sending process has ended") from None

    def _answer(self) -> list[float]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise BenchError("the sending process has ended")
        return [float(each) for each in json.loads(line)]


@contextmanager
def raw_bench(
    transport: str, layout: KVLayout, max_blocks: int, max_transfers: int = NUM_IN_A_ROW
) -> Iterator[RawBench]:
    """For up to so many transfers in one call, of up to `max_blocks` each. Raises BenchError."""
    trust = Trust.fresh()
    try:
        end = ReceivingEnd(transport, trust, layout, max_blocks * max_transfers)
    except (OSError, RuntimeError) as error:
        raise BenchError(f"{transport} cannot be had here: {error}") from error
    bare = RECEIVERS[transport]()
    settings = Settings(
        transport=transport,
        address=end.way.address,
        nonce=end.way.nonce.hex() if end.way.nonce is not None else None,
        bare_port=bare.port,
        num_blocks=max_blocks,
        layout=asdict(layout),
    )
    try:
        module = "pdserve.bench.sending_process"
        with trusted_child(module, settings.dump(), trust.secret) as process:
            yield RawBench(end, bare, process, layout)
    finally:
        bare.stop()
        end.stop()


def measure_raw(
    transport: str,
    layout: KVLayout,
    tokens: Sequence[int],
    num_rounds: int,
    tell: Callable[[], None],
) -> list[RawResult]:
    """Medians over all rounds; `tell` is called after each. Raises BenchError."""
    sizes = {num_tokens: layout.num_blocks_for(num_tokens) for num_tokens in tokens}
    ours: dict[int, list[float]] = {num_tokens: [] for num_tokens in tokens}
    bare: dict[int, list[float]] = {num_tokens: [] for num_tokens in tokens}
    with raw_bench(transport, layout, max(sizes.values())) as bench:
        for num_blocks in sizes.values():  # connections, first touches
            bench.ship_s(num_blocks, NUM_IN_A_ROW)
            bench.bare_s(num_blocks, NUM_IN_A_ROW)
        for _ in range(num_rounds):
            for num_tokens, num_blocks in sizes.items():
                ours[num_tokens] += bench.ship_s(num_blocks, NUM_IN_A_ROW)
                bare[num_tokens] += bench.bare_s(num_blocks, NUM_IN_A_ROW)
            tell()
    return [
        RawResult(
            transport,
            num_tokens,
            num_blocks * layout.block_bytes / median(ours[num_tokens]),
            num_blocks * layout.block_bytes / median(bare[num_tokens]),
        )
        for num_tokens, num_blocks in sizes.items()
    ]
