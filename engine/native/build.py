"""Compiles the kernels, once on a machine for each kind of source, compiler and processor.

The library has a plain C interface and no header of torch's, so this takes seconds. It lies in the user's
cache in a folder of its own, which processes share: one compiles under a lock, the others wait for it. Only
what was loaded once gets there, and from there only what nobody else can have written is loaded.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import torch

from engine.cache_folder import cache_root, check_private, locked, make_private
from engine.errors import NativeUnavailable, first_line
from engine.manifest import MANIFEST, damage, write_manifest
from engine.native.compiler import run_compilers
from engine.native.requirements import cpu_flags, find_compiler

SOURCES = Path(__file__).parent / "src"
LIBRARY = "kernels.so"
# -ffp-contract=off: sums round alike in every instance of a template, so in every batch.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC")
# For all that is run. Well under the time that a worker has for its start (start_timeout_s).
BUILD_TIMEOUT_S = 120.0
# Alone, on one core or on several: most of it is one file.
COMPILING = "compiling kernels, once on this machine: about 15 s"

Load = Callable[[Path], object]


def open_library(path: Path) -> ctypes.CDLL:
    """Raises OSError."""
    return ctypes.CDLL(str(path))


def build_library(
    progress: Callable[[str], None], sources: Path = SOURCES, load: Load = open_library
) -> Path:
    """The compiled library, now or earlier; one that `load` cannot load (it raises OSError or
    NativeUnavailable) is compiled again, once. Raises NativeUnavailable.
    """
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    flags = cpu_flags()
    compiler, version = find_compiler(deadline)
    key = _key([compiler, version, *_FLAGS, *_openmp(), *sorted(flags)], sources)
    try:
        folder = _kernels_folder() / key
        if _flaw(folder, load) is not None:
            progress("waiting for the kernels to be compiled")
            with locked(folder.with_name(f"{folder.name}.lock")):
                if _flaw(folder, load) is not None:
                    progress(COMPILING)
                    _build(compiler, sources, folder, load, deadline)
    except OSError as error:
        raise NativeUnavailable(f"the cache of kernels cannot be used: {error}") from error
    return folder / LIBRARY


def _kernels_folder() -> Path:
    root = cache_root()
    folder = root / "native"
    make_private(root)
    make_private(folder)
    check_private(root, folder)
    return folder


def _flaw(folder: Path, load: Load) -> str | None:
    """Why what is in a folder cannot be used. Raises PermissionError for what others may have put there."""
    library = folder / LIBRARY
    check_private(folder, library, folder / MANIFEST)
    return damage(folder, needed=LIBRARY) or _why_not_loaded(library, load)


def _why_not_loaded(library: Path, load: Load) -> str | None:
    try:
        load(library)
    except (OSError, NativeUnavailable) as error:
        return first_line(error)
    return None


def _build(compiler: str, sources: Path, folder: Path, load: Load, deadline: float) -> None:
    """Nobody sees half of it, or what cannot be loaded. Under the lock."""
    for left_over in folder.parent.glob(f"{folder.name}.*/"):  # of a process that died
        shutil.rmtree(left_over, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    library = unfinished / LIBRARY
    try:
        _compile(compiler, sources, library, deadline)
        library.chmod(0o700)
        write_manifest(unfinished)
        (unfinished / MANIFEST).chmod(0o600)
        reason = _why_not_loaded(library, load)
        if reason is not None:
            raise NativeUnavailable(f"what {compiler} made cannot be used: {reason}")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _compile(compiler: str, sources: Path, library: Path, deadline: float) -> None:
    """The files side by side, then one library of them."""
    with tempfile.TemporaryDirectory(dir=library.parent.parent, prefix=f"{library.parent.name}.") as objects:
        commands = [
            [compiler, *_FLAGS, "-c", str(source), "-o", str(Path(objects, source.stem).with_suffix(".o"))]
            for source in sorted(sources.glob("*.cpp"))
        ]
        run_compilers(commands, deadline)
        made = [command[-1] for command in commands]
        run_compilers([[compiler, "-shared", *made, *_openmp(), "-o", str(library)]], deadline)
    if not library.is_file():
        raise NativeUnavailable(f"{compiler} made no library, and did not say why")


def _openmp() -> list[str]:
    """What to link: torch's own OpenMP, so that one set of threads serves both."""
    folder = Path(torch.__file__).parent / "lib"
    bundled = sorted(folder.glob("libgomp*.so*"))
    return [str(bundled[0]), f"-Wl,-rpath,{folder}"] if bundled else []


def _key(parts: list[str], sources: Path) -> str:
    digest = blake2b(digest_size=12)
    for part in parts:
        digest.update(f"{part}\n".encode())
    for path in sorted(sources.iterdir()):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()
