"""What a token costs, from the model's config and the headers of the weights' files: no weights are read."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pdserve.v1 import generation_pb2

logger = logging.getLogger(__name__)


def read_model_shape(folder: Path, config: Mapping[str, object]) -> generation_pb2.ModelShape | None:
    """`config`: the text model's. None where there are no weights to count, or where a token does not take
    part in all of them."""
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
    vocab_size, hidden_size, num_heads, num_layers = (_integer(config, name) for name in names)
    shapes = _weight_shapes(folder)
    if not (vocab_size and hidden_size and num_heads and num_layers):
        return None
    head = (vocab_size, hidden_size)
    if head not in shapes.values() or any(".experts." in name for name in shapes):
        return None
    return generation_pb2.ModelShape(
        num_layer_weights=sum(math.prod(shape) for shape in shapes.values() if shape != head),
        num_head_weights=math.prod(head),
        num_query_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads") or num_heads,
        head_dim=_integer(config, "head_dim") or hidden_size // num_heads,
        windows=_windows(config, num_layers),
    )


def _weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """By name. Empty where a file cannot be read: whoever loads the weights says so better."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    shapes[name] = tuple(file.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        logger.warning("what a token costs is not known: %s", error)
        return {}
    return shapes


def _windows(config: Mapping[str, object], num_layers: int) -> list[int]:
    """Of each layer, 0 for none. Without kinds of layers, a window is every layer's."""
    width, kinds = _integer(config, "sliding_window") or 0, config.get("layer_types")
    # Qwen's configs name a window that none of its layers has.
    if config.get("use_sliding_window") is False:
        width = 0
    if not isinstance(kinds, list):
        return [width] * num_layers
    return [width if kind == "sliding_attention" else 0 for kind in kinds]


def _integer(config: Mapping[str, object], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) else None
