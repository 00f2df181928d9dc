"""Speculation measured on a tiny model: the figures belong together, whatever they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig, NgramSpeculation
from engine.loading import LoadedModel, load_model
from pdserve.bench.passages import PASSAGES
from pdserve.bench.speculation import MAX_TOKENS, chat_ids, measure_speculation
from tests.models import IM_START, tiny_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    folder = tiny_model(tmp_path_factory.mktemp("models"))
    return load_model(ModelConfig(id=str(folder), device="cpu", dtype="float32"))


def test_every_passage_is_measured_with_drafts_and_without(loaded: LoadedModel) -> None:
    said: list[str] = []
    speculative = NgramSpeculation(method="ngram", max_tokens=4, min_ngram=1)
    results = measure_speculation(loaded, speculative, num_rounds=1, say=said.append)
    assert said == [result.name for result in results] == [passage.name for passage in PASSAGES]
    for result in results:
        assert 1 < result.num_tokens <= MAX_TOKENS
        assert result.ratio == pytest.approx(result.speculative_tok_s / result.plain_tok_s)
        assert 0 <= result.num_accepted_drafts <= result.num_drafts
    assert sum(result.num_drafts for result in results) > 0


def test_a_request_is_a_chat_where_the_model_has_a_template(loaded: LoadedModel, tmp_path: Path) -> None:
    assert chat_ids(loaded.folder, "hi")[0] == IM_START
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((loaded.folder / name).read_bytes())
    assert IM_START not in chat_ids(tmp_path, "hi")
