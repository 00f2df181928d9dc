"""What our kernels ask of a machine. Answered in milliseconds: nothing is compiled, no torch is loaded."""

from __future__ import annotations

import platform
import shutil
import time
from pathlib import Path

from engine.errors import NativeUnavailable
from engine.native.compiler import run_compilers

_COMPILERS = ("g++", "c++")
_NEEDED_FLAG = "avx512f"
_BFLOAT16_FLAG = "avx512_bf16"
_DTYPES = ("bfloat16", "float32")
_TIMEOUT_S = 10.0


def check_machine(dtype: str | None = None) -> None:
    """Raises NativeUnavailable for what this machine lacks (for models of `dtype`, where it is known).

    A compiler that is there may still fail.
    """
    flags = cpu_flags()
    if dtype is not None:
        check_dtype(dtype, has_bfloat16=_BFLOAT16_FLAG in flags)
    find_compiler(time.monotonic() + _TIMEOUT_S)


def check_dtype(dtype: str, has_bfloat16: bool) -> None:
    """Raises NativeUnavailable for a type that the kernels do not compute in."""
    if dtype not in _DTYPES:
        raise NativeUnavailable(f"the kernels have no {dtype}")
    if dtype == "bfloat16" and not has_bfloat16:
        raise NativeUnavailable("the processor has no AVX512-BF16")


def cpu_flags() -> frozenset[str]:
    """The processor's, as Linux names them. Raises NativeUnavailable where they are not enough."""
    if platform.machine() != "x86_64":
        raise NativeUnavailable(f"the processor is {platform.machine()}, the kernels are for x86_64")
    try:
        lines = read_cpuinfo().splitlines()
    except OSError as error:
        raise NativeUnavailable(f"the processor's instructions are unknown: {error}") from error
    line = next((line for line in lines if line.startswith("flags")), "")
    flags = frozenset(line.partition(":")[2].split())
    if _NEEDED_FLAG not in flags:
        raise NativeUnavailable("the processor has no AVX512F")
    return flags


def read_cpuinfo() -> str:
    """Raises OSError."""
    return Path("/proc/cpuinfo").read_text()


def find_compiler(deadline: float) -> tuple[str, str]:
    """Its path and what it says of its version. Raises NativeUnavailable."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        (version,) = run_compilers([[path, "--version"]], deadline)
        if "Free Software Foundation" in version:
            return path, version
    raise NativeUnavailable(f"there is no GNU C++ compiler ({' or '.join(_COMPILERS)} in PATH)")
