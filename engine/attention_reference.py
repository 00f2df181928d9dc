"""What `engine/attention.py` computes, slowly and obviously: one query, one head, one key at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.attention_rules import AttentionRules


def attention_reference(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_table: Sequence[int],
    first_position: int,
    rules: AttentionRules,
) -> torch.Tensor:
    """query [Hq, n, D] at positions `first_position`…, with all K and V it may see in the pool
    `[N, L, 2, H, B, D]` already → [n, Hq, D].
    """
    num_query_heads, num_queries, _ = query.shape
    num_heads, block_size = pool.shape[3], pool.shape[4]
    out = torch.empty(num_queries, num_query_heads, query.shape[2])
    for row in range(num_queries):
        position = first_position + row
        window = rules.sliding_window
        begin = 0 if window is None else max(0, position + 1 - window)
        for head in range(num_query_heads):
            kv_head = head // (num_query_heads // num_heads)
            keys, values = [], []
            for key_position in range(begin, position + 1):
                block = pool[block_table[key_position // block_size], layer]
                keys.append(block[0, kv_head, key_position % block_size].float())
                values.append(block[1, kv_head, key_position % block_size].float())
            scores = [float(query[head, row].float() @ key) * rules.scaling for key in keys]
            if rules.softcap is not None:
                scores = [math.tanh(s / rules.softcap) * rules.softcap for s in scores]
            if rules.sinks is not None:
                scores.append(float(rules.sinks[head]))
            weights = torch.softmax(torch.tensor(scores), 0)
            out[row, head] = sum(
                (w * v for w, v in zip(weights, values, strict=False)), torch.zeros(query.shape[2])
            )
    return out
