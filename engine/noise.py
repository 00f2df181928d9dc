"""Noise that depends on nothing but (seed, position, token id): counter-based, so a token drawn alone,
in any batch, again after a preemption or on another worker is the same token.

SplitMix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) is the
hash. `argmax(logits + gumbel)` is a draw from softmax(logits) (the Gumbel-max trick).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def noise_key(seed: int, position: int) -> int:
    """A 64-bit key for one draw, as a signed number (what an int64 tensor can hold)."""
    return _signed(_mix((_mix(seed & _MASK) + position * _GAMMA) & _MASK))


def noise_keys(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int64]:
    """`noise_key` of each pair."""
    mixed = _mix_array(np.array([seed & _MASK for seed in seeds], np.uint64))
    mixed += np.array(positions, np.uint64) * np.uint64(_GAMMA)
    return _mix_array(mixed).view(np.int64)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """int64 of shapes that broadcast → noise. In float32 it takes two thirds of the time."""
    hashed = _mix_(keys + (token_ids + 1) * _signed(_GAMMA))
    # 1 itself would give -inf, which must stay the mark of what cannot be drawn.
    uniform = _shift(hashed, 11, hashed).to(dtype).add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def _mix_array(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for bits, factor in ((30, _MIX_1), (27, _MIX_2)):
        z = (z ^ (z >> np.uint64(bits))) * np.uint64(factor)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def _mix_(z: torch.Tensor) -> torch.Tensor:
    """The same on int64, in place: products wrap like unsigned ones."""
    spare = torch.empty_like(z)
    _xor_shifted_(z, 30, spare).mul_(_signed(_MIX_1))
    _xor_shifted_(z, 27, spare).mul_(_signed(_MIX_2))
    return _xor_shifted_(z, 31, spare)


def _xor_shifted_(z: torch.Tensor, bits: int, spare: torch.Tensor) -> torch.Tensor:
    return z.bitwise_xor_(_shift(z, bits, spare))


def _shift(z: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """A shift to the right that brings in zeros."""
    return torch.bitwise_right_shift(z, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z
