"""Converted models: each GGUF file becomes a folder of safetensors once. The folder loads in a second, where
reading the file takes many; a hit loads neither torch nor transformers.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from engine.cache_folder import cache_root, locked, make_private
from engine.errors import ModelError
from engine.manifest import damage, write_manifest

# Goes up whenever the same file would give another folder.
_CONVERTER_VERSION = 1
_SAMPLE_BYTES = 2**20
# Short pieces, evenly spread over a file.
_NUM_PIECES, _PIECE_BYTES = 1024, 4096


def convert_gguf(path: Path, progress: Callable[[str], None]) -> Path:
    """The folder made of this file, now or earlier. Parallel callers share one conversion; a folder that is
    not what was written is made again. Raises ModelError.
    """
    try:
        root = cache_root()
        make_private(root)
        folder = root / f"{path.stem}-{_file_key(path)}"
    except OSError as error:
        raise ModelError(f"{path} cannot be read, or the cache not be made: {error}") from error
    if damage(folder) is None:
        return folder
    progress(f"waiting for {path.name} to be converted")
    with locked(root / f"{folder.name}.lock"):
        reason = damage(folder)
        if reason is None:
            return folder
        if folder.exists():
            progress(f"{folder} is made again: {reason}")
        progress(f"converting {path.name} to safetensors (once)")
        for left_over in root.glob(f"{folder.name}.*/"):  # of a process that died; we hold the lock
            shutil.rmtree(left_over, ignore_errors=True)
        _convert(path, folder)
    return folder


def _convert(path: Path, folder: Path) -> None:
    """Nobody sees half of it, and an older folder stays until there is a new one: under the lock."""
    _check_whole(path)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    damaged = unfinished.with_name(f"{unfinished.name}.damaged")
    try:
        from engine.gguf import write_folder  # seconds of imports, for a miss only

        write_folder(path, unfinished)
        write_manifest(unfinished)
        if folder.exists():
            folder.rename(damaged)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(damaged, ignore_errors=True)


def _check_whole(path: Path) -> None:
    try:
        from engine.gguf_file import check_gguf
    except ImportError as error:
        raise ModelError("reading a .gguf file takes: pip install 'pdserve[gguf]'") from error
    check_gguf(path)


def _file_key(path: Path) -> str:
    """By content, not by time: a package installed anew needs no new conversion. Size, head, tail and pieces
    of all between stand for the whole: the head holds the metadata, and training, merging or quantising
    changes tensors from end to end, though perhaps not the last ones.
    """
    size = path.stat().st_size
    digest = blake2b(f"{_CONVERTER_VERSION} {size}".encode(), digest_size=8)
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        for piece in range(1, _NUM_PIECES):
            file.seek(size * piece // _NUM_PIECES)
            digest.update(file.read(_PIECE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
