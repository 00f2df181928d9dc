from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.router.harness import Cluster, running
from tests.models import END_OF_TEXT, IM_END, VOCAB_SIZE, write_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a router reads of a model; no weights."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    config = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1024,
        "eos_token_id": [END_OF_TEXT, IM_END],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest_asyncio.fixture
async def cluster(model_dir: Path) -> AsyncIterator[Cluster]:
    async with running(model_dir) as cluster:
        yield cluster
