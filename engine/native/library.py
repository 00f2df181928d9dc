"""The compiled kernels behind typed functions.

The structures have the fields of those in `src/decoder.h` and `src/attention.h`, in the same order. Every
call lets go of Python's lock until it is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import EngineError, NativeUnavailable
from engine.huge_pages import Slabs
from engine.native.build import build_library
from engine.native.requirements import check_dtype


class NativeError(EngineError):
    """A kernel could not finish: memory ran out, or a bug."""


class PoolView(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("num_layers", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
    )


class PagedRows(Structure):
    _fields_ = (
        ("num_seqs", c_int32),
        ("first_row", c_void_p),
        ("context_len", c_void_p),
        ("block_tables", c_void_p),
        ("table_width", c_int32),
    )


class LayerWeights(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", c_void_p),
        ("qkv_bias", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("attention_out", c_void_p),
        ("attention_out_bias", c_void_p),
        ("mlp_norm", c_void_p),
        ("gate_up", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down", c_void_p),
        ("down_bias", c_void_p),
        ("sliding_window", c_int64),
    )


class ModelWeights(Structure):
    _fields_ = (
        ("is_bf16", c_int64),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("num_query_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("vocab", c_int64),
        ("norm_epsilon", c_float),
        ("attention_scaling", c_float),
        ("layers", POINTER(LayerWeights)),
        ("embedding", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("final_norm", c_void_p),
        ("head", c_void_p),
    )


class Step(Structure):
    _fields_ = (
        ("num_threads", c_int64),
        ("first_layer", c_int64),
        ("last_layer", c_int64),
        ("num_rows", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("num_logits", c_int64),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
        ("pool", PoolView),
        ("paged", PagedRows),
        ("progress", c_void_p),
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [num_outputs, depth] in the order in which the kernels read it."""

    data: torch.Tensor
    num_outputs: int
    depth: int


class NativeLibrary:
    def __init__(self, path: Path) -> None:
        """NativeUnavailable if the file cannot be loaded."""
        self.path = path
        try:
            self.cdll = ctypes.CDLL(str(path))
            _declare(self.cdll)
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"the compiled kernels cannot be loaded: {error}") from error
        self.has_bfloat16 = self.cdll.pdserve_element_types() > 1

    def check_dtype(self, dtype: torch.dtype) -> None:
        """NativeUnavailable for a type that the kernels do not compute in."""
        check_dtype(str(dtype).removeprefix("torch."), self.has_bfloat16)

    def pack(self, weight: torch.Tensor, slabs: Slabs | None = None) -> PackedWeight:
        """weight [N, K]; its copy lies in `slabs`, or in memory of its own."""
        self.check_dtype(weight.dtype)
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        num_outputs, depth = weight.shape
        is_bf16 = weight.dtype is torch.bfloat16
        size = self.cdll.pdserve_packed_size(is_bf16, num_outputs, depth)
        data = (slabs or Slabs()).take(size, weight.dtype)
        failure = self.cdll.pdserve_pack_weight(
            torch.get_num_threads(),
            is_bf16,
            weight.data_ptr(),
            weight.stride(0),
            num_outputs,
            depth,
            data.data_ptr(),
        )
        check(failure)
        return PackedWeight(data, num_outputs, depth)

    def multiply(
        self, rows: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """rows [M, K] → float32 [M, N]; `bias` [N] is float32."""
        if rows.dtype is not weight.data.dtype or rows.shape[1] != weight.depth:
            raise ValueError(f"rows of {rows.dtype}, {rows.shape[1]} wide, do not fit the weight")
        rows = rows.contiguous()
        out = rows.new_empty((rows.shape[0], weight.num_outputs), dtype=torch.float32)
        failure = self.cdll.pdserve_multiply(
            torch.get_num_threads(),
            rows.dtype is torch.bfloat16,
            rows.data_ptr(),
            rows.shape[0],
            weight.data.data_ptr(),
            weight.num_outputs,
            weight.depth,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
        )
        check(failure)
        return out

    def new_workspace(self) -> int:
        """Its address; `free_workspace` takes it back."""
        address: int | None = self.cdll.pdserve_new_workspace()
        if address is None:
            raise NativeError("there is no memory for a step")
        return address

    def free_workspace(self, address: int) -> None:
        self.cdll.pdserve_free_workspace(address)

    def run_layers(self, model: ModelWeights, workspace: int, step: Step) -> None:
        check(self.cdll.pdserve_run_layers(ctypes.byref(model), workspace, ctypes.byref(step)))


def load_library(progress: Callable[[str], None]) -> NativeLibrary:
    """Compiles it where that was not done yet. Raises NativeUnavailable."""
    return NativeLibrary(build_library(progress, load=NativeLibrary))


def check(failure: bytes | None) -> None:
    """`failure` is what a kernel gave back."""
    if failure is not None:
        raise NativeError(failure.decode())


def _declare(cdll: ctypes.CDLL) -> None:
    flag = c_int64
    cdll.pdserve_element_types.argtypes = ()
    cdll.pdserve_element_types.restype = c_int64
    cdll.pdserve_packed_size.argtypes = (flag, c_int64, c_int64)
    cdll.pdserve_packed_size.restype = c_int64
    cdll.pdserve_pack_weight.argtypes = (c_int64, flag, c_void_p, c_int64, c_int64, c_int64, c_void_p)
    cdll.pdserve_pack_weight.restype = c_char_p
    cdll.pdserve_multiply.argtypes = (
        c_int64, flag, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p,
    )  # fmt: skip
    cdll.pdserve_multiply.restype = c_char_p
    cdll.pdserve_new_workspace.argtypes = ()
    cdll.pdserve_new_workspace.restype = c_void_p
    cdll.pdserve_free_workspace.argtypes = (c_void_p,)
    cdll.pdserve_free_workspace.restype = None
    cdll.pdserve_run_layers.argtypes = (POINTER(ModelWeights), c_void_p, POINTER(Step))
    cdll.pdserve_run_layers.restype = c_char_p
