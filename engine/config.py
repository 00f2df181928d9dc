"""The engine's settings: checked once, here, and the one source of defaults."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
DEFAULT_KV_CACHE_BYTES = 2**30


def parse_size(value: object) -> object:
    """ "1.5GiB" → bytes; what is no string is left to pydantic."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write a number of bytes or one like 512MiB, 1GiB, 2GB")
    return int(float(match[1]) * _UNITS[match[2]])


ByteSize = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


class ModelConfig(BaseModel):
    """Which model, and how it is held."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # A hub id, a folder of safetensors, a .gguf file, or the packaged "smollm2-135m".
    id: str = "smollm2-135m"
    # auto: the checkpoint's own (float16 becomes bfloat16 on a CPU).
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # auto: cuda where there is one.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # None: the model's own context.
    max_model_len: int | None = Field(default=None, gt=0)
    # Kernels compiled on this machine, once. auto: where it can; on: or refuse the model; off: torch alone.
    compile: Literal["auto", "on", "off"] = "auto"


class NgramSpeculation(BaseModel):
    """Drafts are what followed the last tokens where they stood in the prompt or the output before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ngram"]
    # Drafts that one step verifies for a sequence at most; how many really pay is found out while it runs.
    max_tokens: int = Field(default=8, ge=1, le=64)
    # So many last tokens must have stood there before; the longest that have are followed.
    min_ngram: int = Field(default=2, ge=1, le=16)
    max_ngram: int = Field(default=4, ge=1, le=16)

    @model_validator(mode="after")
    def _has_a_size(self) -> NgramSpeculation:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is more than max_ngram {self.max_ngram}")
        return self


# By `method`; a union of models once there is a second one.
SpeculativeConfig = NgramSpeculation


class EngineConfig(BaseModel):
    """How much one engine takes on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = Field(default=16, gt=0)
    # The KV pool, in bytes or in blocks; 1GiB where neither is set.
    kv_cache: ByteSize | None = None
    num_blocks: int | None = Field(default=None, gt=0)
    # Sequences running at once. A step never decodes more than max_num_batched_tokens of them.
    max_num_seqs: int = Field(default=64, gt=0)
    # Tokens that one step computes at most.
    max_num_batched_tokens: int = Field(default=512, gt=0)
    # Whose prompt goes on in the next step. shortest: the one with the fewest tokens left that no cache has,
    # also before one that is half computed.
    prefill_order: Literal["fcfs", "shortest"] = "fcfs"
    # Of shortest: a prompt counts for less the longer it waits, and for nothing from here on.
    prefill_aging_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    # None: the model's.
    max_model_len: int | None = Field(default=None, gt=0)
    enable_prefix_caching: bool = True
    # Tokens a step that preempted sequences may recompute beside others that decode.
    max_recompute_tokens: int = Field(default=128, gt=0)
    # Tokens are guessed and verified several at a time; the output stays the same. None: off.
    speculative: SpeculativeConfig | None = None
    # For tests: blocks are filled with NaN whenever they are taken.
    poison_blocks: bool = False

    @model_validator(mode="after")
    def _sized_once(self) -> EngineConfig:
        if self.kv_cache is not None and self.num_blocks is not None:
            raise ValueError("set kv_cache or num_blocks, not both")
        return self
