"""What a row asks of a machine, and the shape of the model behind it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from engine.architecture import read_config
from engine.layout import DTYPES, KVLayout
from engine.safetensors_file import read_entries
from pdserve.bench.rows import Phase, Plan, Row
from pdserve.bench.work import ModelShape, Work, decode_work, prefill_work


def row_work(shape: ModelShape, row: Row, plan: Plan) -> Work:
    """A prefill's, or that of one step of decoding."""
    if row.phase is Phase.PREFILL:
        return prefill_work(shape, row.context)
    return decode_work(shape, row.batch, plan.mean_context(row))


def read_shape(folder: Path, layout: KVLayout) -> ModelShape | None:
    """Of the model in a folder of safetensors; None where not every weight takes part in every token."""
    config = read_config(folder).get_text_config()
    shapes = {
        name: torch.Size(entry.shape)
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in read_entries(path).items()
    }
    head = torch.Size((config.vocab_size, config.hidden_size))
    if _has_experts(shapes) or head not in shapes.values():
        return None
    return ModelShape(
        num_layer_weights=sum(shape.numel() for shape in shapes.values() if shape != head),
        num_head_weights=head.numel(),
        num_query_heads=int(config.num_attention_heads),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        windows=_windows(
            getattr(config, "sliding_window", None), getattr(config, "layer_types", None), layout.num_layers
        ),
        itemsize=DTYPES[layout.dtype].itemsize,
    )


def _has_experts(names: Iterable[str]) -> bool:
    return any(".experts." in name for name in names)


def _windows(window: object, kinds: object, num_layers: int) -> tuple[int | None, ...]:
    """Without kinds of layers, a window is every layer's."""
    width = window if isinstance(window, int) else None
    if not isinstance(kinds, list):
        return (width,) * num_layers
    return tuple(width if kind == "sliding_attention" else None for kind in kinds)
