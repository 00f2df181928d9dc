from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils import logging as transformers_logging

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.kv_pool import AllocateMemory, allocate_memory
from engine.loading import LoadedModel, load_model
from engine.loop import EngineLoop
from kv_transfer.blocks import BlockStore, Cells
from tests.integration.workers.mini_router import Cluster
from tests.integrity import held, nothing_leaks, wait_until
from tests.models import tiny_model
from tests.unit.engine.driving import Reference

__all__ = ["nothing_leaks"]

MakeLoop = Callable[..., EngineLoop]


@pytest.fixture(scope="session", autouse=True)
def _one_quiet_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu"))


@pytest.fixture(scope="session")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture
def make_loop(loaded: LoadedModel) -> Iterator[MakeLoop]:
    """Engines with small pools whose blocks hold NaN until they are computed."""
    loops: list[EngineLoop] = []

    def make(allocate: AllocateMemory = allocate_memory, **settings: object) -> EngineLoop:
        defaults: dict[str, object] = {"num_blocks": 64, "max_num_batched_tokens": 48, "poison_blocks": True}
        loop = EngineLoop(Engine(loaded, EngineConfig.model_validate(defaults | settings), allocate))
        loop.start()
        loops.append(loop)
        return loop

    yield make
    for loop in loops:
        assert loop.failure is None
        assert wait_until(lambda loop=loop: not loop.call(held).result(5)), loop.call(held).result(5)  # type: ignore[misc]
        loop.stop()


@pytest.fixture
async def cluster(make_loop: MakeLoop) -> AsyncIterator[Cluster]:
    """Workers in this process and a router of a few lines; `await cluster.start(...)` brings them up."""
    made = Cluster(make_loop)
    yield made
    await made.stop()


@pytest.fixture(autouse=True)
def no_uncomputed_kv_arrives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks are NaN until they are computed (`poison_blocks`): none of it may be shipped."""
    make, spoiled = Cells.__init__, list[int]()

    def checked(
        self: Cells,
        store: BlockStore,
        block_ids: Sequence[int],
        layers: range,
        num_tail_tokens: int | None = None,
    ) -> None:
        make(self, store, block_ids, layers, num_tail_tokens)
        if any(np.isnan(np.frombuffer(piece, dtype=np.float32)).any() for piece in self.pieces):
            spoiled.extend(block_ids)

    monkeypatch.setattr(Cells, "__init__", checked)
    yield
    assert spoiled == []


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]
