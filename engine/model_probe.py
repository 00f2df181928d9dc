"""Checks that a model is one whose tokens we would get right, by running a few through it with an attention
that only takes notes. What could not be honoured is refused here, by name and reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from engine.architecture import check_every_layer_called
from engine.attention_probe import AttentionProbe, LayerNotes
from engine.errors import UnsupportedModel, first_line

_SERVED_LAYERS = ("full_attention", "sliding_attention")
_TOKENS = (1, 2, 3)
# One token at one position, computed in another row: kernels may differ in the last bits of bfloat16.
_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class ModelShape:
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sliding_windows: tuple[int | None, ...]  # of each layer


@dataclass(frozen=True, slots=True)
class _Run:
    layers: Mapping[int, LayerNotes]
    logits: torch.Tensor  # [1, 1, V] of the watched row


def probe_model(module: torch.nn.Module, hf_config: PreTrainedConfig, device: torch.device) -> ModelShape:
    """Raises UnsupportedModel."""
    kind = str(hf_config.model_type)
    last = len(_TOKENS) - 1
    order = range(len(_TOKENS))
    try:
        run = _run(module, order, last, device)
        _check_layers(hf_config, run.layers)
        if run.logits.shape[:2] != (1, 1):
            raise UnsupportedModel("it does not give logits of chosen rows only")
        _check_rows_are_independent(run, _run(module, (last, *order[:-1]), 0, device))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{kind}: {error}") from error
    except Exception as error:  # the model's own code, written for other attentions
        raise UnsupportedModel(
            f"{kind} cannot run on packed rows with our attention: {first_line(error)}"
        ) from error
    layer = run.layers[0]
    windows = tuple(notes.sliding_window for _, notes in sorted(run.layers.items()))
    return ModelShape(layer.num_kv_heads, layer.head_dim, int(run.logits.shape[-1]), windows)


@torch.inference_mode()
def _run(module: torch.nn.Module, positions: Sequence[int], row: int, device: torch.device) -> _Run:
    """Runs the token of each position, in this order of rows, as one packed step."""
    probe = AttentionProbe(watched_row=row)
    output = module(
        input_ids=torch.tensor([[_TOKENS[position] for position in positions]], device=device),
        position_ids=torch.tensor([list(positions)], device=device),
        use_cache=False,
        logits_to_keep=torch.tensor([row], device=device),
        paged_batch=probe,
    )
    return _Run(probe.layers, output.logits)


def _check_layers(hf_config: PreTrainedConfig, layers: Mapping[int, LayerNotes]) -> None:
    check_every_layer_called(hf_config, layers)
    kinds: Sequence[str] = getattr(hf_config, "layer_types", None) or ()  # not every family has them
    unknown = sorted(set(kinds) - set(_SERVED_LAYERS))
    if unknown:
        raise UnsupportedModel(f"its layers are of the kinds {unknown}, unknown here")
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and layers[layer].sliding_window is None:
            raise UnsupportedModel(f"layer {layer} slides, and does not tell its attention how far")
    shapes = {(notes.num_kv_heads, notes.head_dim) for notes in layers.values()}
    if len(shapes) != 1:
        raise UnsupportedModel(f"layers differ in KV heads or head size: {sorted(shapes)}")


def _check_rows_are_independent(one: _Run, other: _Run) -> None:
    """A token at its position is the same in whatever row, since the attention gave nothing. It is not
    where a recurrence or a convolution runs beside the attention, or where positions are counted by row.
    """
    for layer, notes in one.layers.items():
        if _differ(notes.row, other.layers[layer].row):
            raise UnsupportedModel(f"layer {layer} mixes tokens outside its attention, or counts rows")
    if _differ(one.logits, other.logits):
        raise UnsupportedModel("it mixes tokens outside its attention")


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() > _TOLERANCE * one.abs().max())
