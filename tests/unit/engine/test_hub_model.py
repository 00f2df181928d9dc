"""A model of the hub: found where it was downloaded, and why it cannot be had is told as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

from engine.model_facts import locate_model


def test_a_model_that_was_downloaded_is_found_though_we_took_not_all_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache knows what else the hub has: README.md, other formats."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model, commit = tmp_path / "models--org--name", "a" * 40
    folder = model / "snapshots" / commit
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    (folder / "config.json").write_text("{}")
    entries = {name: TreeCacheEntry(size=2, blob_id="b" * 40) for name in ("config.json", "README.md")}
    write_tree_cache(str(model), commit, entries)
    assert locate_model("org/name") == folder
    (folder / "config.json").unlink()  # a download that was interrupted
    assert locate_model("org/name") is None
