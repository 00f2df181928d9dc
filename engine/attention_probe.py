"""Takes the place of a batch while a model is checked: notes what each layer's attention is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine.errors import UnsupportedModel

# What models pass along that does not change the result here: rows are packed, and everything is causal.
_HARMLESS = frozenset(
    {
        "dropout",
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


@dataclass(frozen=True, slots=True)
class LayerNotes:
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    # What the watched row brings to the attention: query, key and value of all heads, flat.
    row: torch.Tensor


@dataclass(slots=True)
class AttentionProbe:
    watched_row: int
    layers: dict[int, LayerNotes] = field(default_factory=dict)

    def note(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sliding_window: int | None,
        others: Mapping[str, object],
    ) -> None:
        """query [1, Hq, T, D], key and value [1, H, T, D]. UnsupportedModel for what we do not know."""
        if others.get("is_causal") is False:
            raise UnsupportedModel(f"layer {layer}'s attention is not causal: a token sees those behind it")
        unknown = [
            name for name, v in others.items() if v is not None and name not in {*_HARMLESS, "is_causal"}
        ]
        if unknown:
            raise UnsupportedModel(f"layer {layer}'s attention asks for {sorted(unknown)}, unknown here")
        if key.shape != value.shape:
            raise UnsupportedModel(
                f"layer {layer}'s K and V heads differ in size: {key.shape[-1]} and {value.shape[-1]}"
            )
        row = torch.cat([part[0, :, self.watched_row].flatten() for part in (query, key, value)])
        self.layers[layer] = LayerNotes(key.shape[1], key.shape[3], sliding_window, row)
