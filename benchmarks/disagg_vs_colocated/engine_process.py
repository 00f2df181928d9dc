"""An engine in a process of its own, connected to nothing; its settings are its argument. Orders on stdin and
answers on stdout are JSON, one line each; it ends when stdin closes.

It measures how long each phase takes where nothing else costs anything, and it is the control of the
interference: as much prefilling on the other core, by a process that has no part in the serving.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.threads import use_threads
from pdserve.bench.ours import OurEngine

_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Settings:
    model: str
    max_tokens: int  # of all sequences together
    max_num_seqs: int
    core: int | None  # None: wherever the system puts it

    def dump(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Order:
    """`batch` 0: prefill a prompt of `num_tokens`. Else: that many sequences with so much context each decode
    `num_steps`. `is_endless`: again and again, until something else is ordered.
    """

    num_tokens: int
    batch: int = 0
    num_steps: int = 0
    is_endless: bool = False

    def dump(self) -> str:
        return json.dumps(asdict(self))


class _Worker:
    def __init__(self, settings: Settings) -> None:
        config = EngineConfig(
            num_blocks=settings.max_tokens // EngineConfig().block_size + 4 * settings.max_num_seqs,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=_CHUNK,
            enable_prefix_caching=False,
        )
        self._engine = OurEngine(Engine.load(ModelConfig(id=settings.model), config, lambda _: None))
        self._rng = random.Random(0)

    def do(self, order: Order) -> float:
        """Seconds of one prefill, or of one step."""
        if order.batch == 0:
            return self._engine.prefill(self._prompt(order.num_tokens)).seconds
        self._begin(order)
        seconds = self._engine.decode(order.num_steps).seconds / order.num_steps
        self._engine.end()
        return seconds

    def keep_doing(self, order: Order, tell: Callable[[], None]) -> None:
        """Until a line lies on stdin. `tell` is called when it has begun."""
        if order.batch == 0:
            tell()
            while not _is_told():
                self._engine.prefill(self._prompt(order.num_tokens))
            return
        self._decode_on(order, tell)
        while not _is_told():
            self._decode_on(order, _nothing)

    def _decode_on(self, order: Order, tell: Callable[[], None]) -> None:
        self._begin(order)
        tell()
        num_left = order.num_steps
        while num_left > 0 and not _is_told():
            self._engine.decode(1)
            num_left -= 1
        self._engine.end()

    def _begin(self, order: Order) -> None:
        prompts = [self._prompt(order.num_tokens) for _ in range(order.batch)]
        self._engine.begin(prompts, order.num_steps + 2)

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(1000, 20000) for _ in range(num_tokens)]


def _nothing() -> None:
    """Who ordered it knows already."""


def _is_told() -> bool:
    return bool(select.select([0], [], [], 0)[0])


def _lines() -> Iterator[str]:
    """Raw reads, so that nothing is buffered that `select` would not see: orders come one at a time."""
    rest = b""
    while block := os.read(0, 65536):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line.decode()


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    if settings.core is not None:
        os.sched_setaffinity(0, {settings.core})
    use_threads(1)
    worker = _Worker(settings)
    _answer(0.0)
    for line in _lines():
        order = Order(**json.loads(line))
        if order.is_endless:
            worker.keep_doing(order, lambda: _answer(0.0))
        else:
            _answer(worker.do(order))


def _answer(seconds: float) -> None:
    sys.stdout.write(json.dumps(seconds) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
