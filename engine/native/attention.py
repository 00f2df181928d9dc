"""The kernels' attention, for models whose other layers are transformers' own."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p

import torch

from engine.attention_rules import AttentionRules
from engine.batch import PagedBatch
from engine.native.library import NativeLibrary, PagedRows, PoolView, check
from engine.native.views import view_pool, view_rows

_HEAD_DIM_UNIT, _MAX_HEAD_DIM = 16, 256


class _Rules(Structure):
    """The fields of `AttentionRules` in `src/attention.h`, in the same order."""

    _fields_ = (
        ("scaling", c_float),
        ("sliding_window", c_int32),
        ("softcap", c_float),
        ("sinks", c_void_p),
    )


class NativeAttention:
    def __init__(self, library: NativeLibrary) -> None:
        self._attend = library.cdll.pdserve_attend
        self._attend.argtypes = (
            c_int64, c_int64, POINTER(PoolView), c_int64, POINTER(PagedRows), c_void_p, c_int64, c_void_p,
            c_void_p, c_int64, c_int64, c_void_p, c_int64, POINTER(_Rules),
        )  # fmt: skip
        self._attend.restype = c_char_p

    def can_attend(self, query: torch.Tensor, pool: torch.Tensor, rules: AttentionRules) -> bool:
        """Whether the kernels compute this. `query` [Hq, T, D]."""
        head_dim = query.shape[2]
        return (
            query.dtype is pool.dtype
            and head_dim % _HEAD_DIM_UNIT == 0
            and head_dim <= _MAX_HEAD_DIM
            and rules.scaling > 0
        )

    def attend(
        self,
        batch: PagedBatch,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
    ) -> torch.Tensor:
        """query [Hq, T, D], key and value [H, T, D] → [T, Hq, D]; writes key and value to the pool first."""
        num_heads, num_tokens, head_dim = query.shape
        query, key, value = _by_rows(query), _by_rows(key), _by_rows(value)
        if key.stride(0) != value.stride(0):
            key, value = key.contiguous(), value.contiguous()
        sinks = None if rules.sinks is None else rules.sinks.float().contiguous()
        out = query.new_empty(num_tokens, num_heads, head_dim)
        failure: bytes | None = self._attend(
            torch.get_num_threads(),
            query.dtype is torch.bfloat16,
            ctypes.byref(view_pool(batch.pool)),
            layer,
            ctypes.byref(view_rows(batch)),
            query.data_ptr(),
            query.stride(0),
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            num_heads,
            out.data_ptr(),
            out.stride(0),
            ctypes.byref(
                _Rules(
                    rules.scaling,
                    rules.sliding_window or 0,
                    rules.softcap or 0,
                    None if sinks is None else sinks.data_ptr(),
                )
            ),
        )
        check(failure)
        return out


def _by_rows(heads: torch.Tensor) -> torch.Tensor:
    """[H, T, D] → [T, H·D] whose rows are contiguous: most models make it so, without a copy."""
    return heads.transpose(0, 1).flatten(1)
