"""Holds a faster way to run a model against its module, on a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.batch import BatchRow, PackedBatch, pack
from engine.errors import NativeUnavailable
from engine.kv_pool import KVPool
from engine.layout import KVLayout

_NUM_TOKENS = 21
# Of the pools in which they are computed.
BLOCK_SIZE = 16
_CPU = torch.device("cpu")
# Of the length of the difference to the logits' own. bfloat16 rounds at other places than the module does.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

RunBatch = Callable[[PackedBatch], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Answer:
    """Logits [R, vocab] of a chunk, and of one token behind it."""

    logits: torch.Tensor

    def check(self, expected: Answer, dtype: torch.dtype) -> None:
        """Raises NativeUnavailable if the two are not the same model's."""
        difference = (self.logits - expected.logits).norm() / expected.logits.norm()
        if not difference <= _TOLERANCE[dtype]:  # NaN is no answer either
            raise NativeUnavailable(f"they give other logits than the module, {float(difference):.1g} off")


@torch.inference_mode()
def answer(
    run: RunBatch,
    layout: KVLayout,
    vocab_size: int,
    max_model_len: int,
    device: torch.device = _CPU,
) -> Answer:
    """What `run` computes of some random tokens, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = min(_NUM_TOKENS, max_model_len)
    token_ids = torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()
    num_blocks = layout.num_blocks_for(num_tokens)
    pool = KVPool(layout, num_blocks, device)
    table = range(num_blocks)[::-1]
    chunk = BatchRow(token_ids[:-1], 0, table)
    last = BatchRow(token_ids[-1:], num_tokens - 1, table)
    rows = [row for row in (chunk, last) if row.token_ids]
    logits = [run(pack([row], [len(row.token_ids)], pool)).float().cpu() for row in rows]
    return Answer(torch.cat(logits))
