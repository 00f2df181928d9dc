"""`draw_tokens` of `engine/draw.py` as one pass of a compiled kernel over each row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int64, c_void_p

import numpy as np
import torch

from engine.draw import Drawn, Wishes, draw_tokens
from engine.errors import NativeUnavailable
from engine.native.library import NativeLibrary, check

_DTYPES = (torch.float32, torch.bfloat16)


class _Wishes(Structure):
    """The fields of `Wishes` in `src/sampling.cpp`, in the same order."""

    _fields_ = (
        ("num", c_int64),
        ("rows", c_void_p),
        ("temperatures", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("keys", c_void_p),
        ("token_ids", c_void_p),
        ("is_finite", c_void_p),
    )


def native_draw(library: NativeLibrary) -> Callable[[torch.Tensor, Wishes], Drawn]:
    """`draw_tokens` by `library`; scores that it does not read are drawn as ever."""
    try:
        function = library.cdll.pdserve_draw
    except AttributeError as error:
        raise NativeUnavailable(f"the compiled kernels draw no tokens: {error}") from error
    function.argtypes = (c_int64, c_int64, c_void_p, c_int64, c_int64, POINTER(_Wishes))
    function.restype = c_char_p

    def draw(scores: torch.Tensor, wishes: Wishes) -> Drawn:
        if scores.device.type != "cpu" or scores.dtype not in _DTYPES or scores.stride(1) != 1:
            return draw_tokens(scores, wishes)
        num = len(wishes.rows)
        drawn = Drawn(np.empty(num, np.int64), np.empty(num, np.bool_))
        arrays = (
            wishes.rows,
            wishes.temperatures,
            wishes.top_k,
            wishes.top_p,
            wishes.min_p,
            wishes.keys,
            drawn.token_ids,
            drawn.is_finite,
        )
        pointers = _Wishes(num, *(array.ctypes.data for array in arrays))
        failure: bytes | None = function(
            torch.get_num_threads(),
            scores.dtype is torch.bfloat16,
            scores.data_ptr(),
            scores.stride(0),
            scores.shape[1],
            ctypes.byref(pointers),
        )
        check(failure)
        return drawn

    return draw
