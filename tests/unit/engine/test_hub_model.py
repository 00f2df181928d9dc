"""A model of the hub: found where it was downloaded, and why it cannot be had is told as it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from huggingface_hub import constants
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from engine import weights
from engine.errors import ModelNotFound
from engine.model_facts import locate_model
from engine.weights import resolve_model

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/hub")
DENIED = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/hub")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NO_SPACE, "local cache: .*No space left.*'/hub'"),
        (DENIED, "local cache: .*Permission denied"),
        (GatedRepoError("403", response=MagicMock()), "is there, but .*ask for access .*set HF_TOKEN"),
        (RepositoryNotFoundError("404", response=MagicMock()), "is no folder, no .gguf file and no model"),
        (ConnectionError("offline mode is enabled"), "is not in the hub's local cache, and the hub"),
    ],
)
def test_why_the_hub_gives_no_model(error: OSError, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(weights, "snapshot_download", download)
    with pytest.raises(ModelNotFound, match=f"org/name .*{told}"):
        resolve_model("org/name")


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
