"""Compiles the kernels, once on a machine for each kind of source, compiler and processor.

The library has a plain C interface and no header of torch's, so this takes seconds. It lies in the user's
cache in a folder of its own, which processes share: one compiles under a lock, the others wait for it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import torch

from engine.converted import cache_root, locked
from engine.errors import EngineError
from engine.manifest import damage, write_manifest

SOURCES = Path(__file__).parent / "src"
LIBRARY = "kernels.so"
_COMPILERS = ("g++", "c++")
# -ffp-contract=off: sums round alike in every instance of a template, so in every batch.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC")
_NEEDED_FLAG = "avx512f"
_COMPILE_TIMEOUT_S = 300


class NativeUnavailable(EngineError):
    """Our kernels cannot be had for this machine or model; says why."""


def build_library(progress: Callable[[str], None], sources: Path = SOURCES) -> Path:
    """The compiled library, now or earlier. Raises NativeUnavailable."""
    cpu_flags = _cpu_flags()
    if _NEEDED_FLAG not in cpu_flags:
        raise NativeUnavailable("the processor has no AVX512F")
    compiler, version = _compiler()
    key = _key([compiler, version, *_FLAGS, *_openmp(), *sorted(cpu_flags)], sources)
    try:
        folder = cache_root() / "native" / key
        folder.parent.mkdir(parents=True, exist_ok=True)
        if damage(folder) is not None:
            _build_under_lock(compiler, sources, folder, progress)
    except OSError as error:
        raise NativeUnavailable(f"the cache of kernels cannot be used: {error}") from error
    return folder / LIBRARY


def _build_under_lock(compiler: str, sources: Path, folder: Path, progress: Callable[[str], None]) -> None:
    progress("waiting for the kernels to be compiled")
    with locked(folder.with_name(f"{folder.name}.lock")):
        if damage(folder) is None:
            return
        progress("compiling kernels, once on this machine")
        for left_over in folder.parent.glob(f"{folder.name}.*/"):  # of a process that died; we hold the lock
            shutil.rmtree(left_over, ignore_errors=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            _compile(compiler, sources, unfinished / LIBRARY)
            write_manifest(unfinished)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _compile(compiler: str, sources: Path, library: Path) -> None:
    """The files side by side, then one library of them."""
    with tempfile.TemporaryDirectory(dir=library.parent.parent, prefix=f"{library.parent.name}.") as objects:
        commands = [
            [compiler, *_FLAGS, "-c", str(source), "-o", str(Path(objects, source.stem).with_suffix(".o"))]
            for source in sorted(sources.glob("*.cpp"))
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for _ in threads.map(_run, commands):
                pass
        made = [command[-1] for command in commands]
        _run([compiler, "-shared", *made, *_openmp(), "-o", str(library)])


def _run(command: list[str]) -> str:
    """What the compiler says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit {done.returncode}"]
        raise NativeUnavailable(f"{command[0]} cannot compile the kernels: {said[0]}")
    return done.stdout


def _compiler() -> tuple[str, str]:
    """The compiler's path and what it says of its version."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        version = _run([path, "--version"])
        if "Free Software Foundation" in version:
            return path, version
    raise NativeUnavailable(f"there is no GNU C++ compiler ({' or '.join(_COMPILERS)} in PATH)")


def _cpu_flags() -> frozenset[str]:
    if platform.machine() != "x86_64":
        raise NativeUnavailable(f"the processor is {platform.machine()}, the kernels are for x86_64")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError as error:
        raise NativeUnavailable(f"the processor's instructions are unknown: {error}") from error
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


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
