from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.loading import LoadedModel, load_model
from engine.native.load import Compile
from tests.models import tiny_model
from tests.unit.engine.driving import Reference

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session", autouse=True)
def _one_quiet_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def loaded(model_root: Path) -> Callable[..., LoadedModel]:
    """One loaded tiny model of each family and way for the whole run: engines share the weights."""
    models: dict[tuple[str, str], LoadedModel] = {}

    def load(family: str, compile: Compile = "auto") -> LoadedModel:
        if (family, compile) not in models:
            folder = tiny_model(model_root, family)
            models[family, compile] = load_model(ModelConfig(id=str(folder), device="cpu", compile=compile))
        return models[family, compile]

    return load


@pytest.fixture(scope="session")
def reference(model_root: Path) -> Callable[[str], Reference]:
    references: dict[str, Reference] = {}

    def load(family: str) -> Reference:
        if family not in references:
            references[family] = Reference(tiny_model(model_root, family))
        return references[family]

    return load


@pytest.fixture
def make_engine(loaded: Callable[..., LoadedModel]) -> Iterator[MakeEngine]:
    """Engines with a small poisoned pool; after the test their books must balance with nothing held."""
    engines: list[Engine] = []

    def make(family: str = "llama", *, compile: Compile = "auto", **settings: object) -> Engine:
        defaults: dict[str, object] = {"num_blocks": 64, "max_num_batched_tokens": 48, "poison_blocks": True}
        engine = Engine(loaded(family, compile), EngineConfig.model_validate(defaults | settings))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.check_integrity()
        load = engine.snapshot()
        assert (load.num_running, load.num_waiting, load.num_reservations) == (0, 0, 0)
        assert load.blocks_free == load.blocks_total


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()
