"""What of our kernels a model gets: the library, and a decoder of its own where they know its layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from engine.errors import ModelError, NativeUnavailable
from engine.layout import KVLayout
from engine.native.decoder import NativeDecoder, NativeRun
from engine.native.library import NativeLibrary, load_library
from engine.native.recognise import recognise
from engine.native.verify import RunBatch, answer

log = logging.getLogger(__name__)

Compile = Literal["auto", "on", "off"]


class NativeDiffers(NativeUnavailable):
    """The decoder does not compute what its module does, which is empty by now."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """`library` is None where models run on torch; `told` says what computes, and why."""

    library: NativeLibrary | None
    told: str


def library_for(
    wanted: Compile, device: torch.device, dtype: torch.dtype, progress: Callable[[str], None]
) -> Kernels:
    """Without a library where none can be had, none is wanted, or no CPU is used. ModelError if it is wanted
    and cannot be had.
    """
    if wanted == "off" or device.type != "cpu":
        why = "compile is off" if wanted == "off" else f"our kernels are for CPUs, not for {device.type}"
        return Kernels(None, f"torch: {why}")
    try:
        library = load_library(progress)
        library.check_dtype(dtype)
    except NativeUnavailable as error:
        if wanted == "on":
            raise ModelError(f"compile: on was asked for, and the kernels cannot be had: {error}") from error
        log.warning("running on torch alone, at about half the speed, without our kernels: %s", error)
        return Kernels(None, f"torch: {error}")
    return Kernels(library, "compiled")


@torch.inference_mode()
def make_decoder(
    module: torch.nn.Module,
    run_module: RunBatch,
    sliding_windows: Sequence[int | None],
    layout: KVLayout,
    max_model_len: int,
    library: NativeLibrary,
) -> NativeDecoder:
    """Takes the weights out of `module`. Raises NativeUnavailable with the module whole, or NativeDiffers."""
    parts = recognise(module, sliding_windows)
    vocab_size = parts.embedding.num_embeddings
    expected = answer(run_module, layout, vocab_size, max_model_len)
    decoder = NativeDecoder(parts, library, max_model_len)
    try:
        answer(NativeRun(decoder).run, layout, vocab_size, max_model_len).check(expected, parts.dtype)
    except NativeUnavailable as error:
        raise NativeDiffers(str(error)) from error
    for parameter in module.parameters():
        # One parameter left in the mapped file would keep all of it in memory.
        parameter.data = parameter.data.new_empty(0)
    return decoder
