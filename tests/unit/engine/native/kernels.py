"""The kernels of this machine, for tests that cannot do without."""

from __future__ import annotations

from functools import cache

import pytest

from engine.errors import NativeUnavailable
from engine.native.library import NativeLibrary, load_library


@cache
def _library() -> NativeLibrary | str:
    try:
        return load_library(lambda _: None)
    except NativeUnavailable as error:
        return str(error)


def library_or_skip() -> NativeLibrary:
    found = _library()
    if isinstance(found, str):
        pytest.skip(f"no kernels on this machine: {found}")
    return found
