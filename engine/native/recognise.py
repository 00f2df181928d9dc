"""Whether a transformers module is a stack that our kernels compute, and what it is made of.

Families are known by their exact classes: a subclass may do something else. Numbers come from the module
itself, its rotary tables too; that all of it is right is then verified (engine/native/verify.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.activations import SiLUActivation

from engine.errors import NativeUnavailable

# The folder in transformers.models, and what the family's classes begin with.
_FAMILIES: Mapping[str, str] = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_SILU = (nn.SiLU, SiLUActivation)
_MAX_HEAD_DIM = 256
_HEAD_DIM_UNIT = 16


@dataclass(frozen=True, slots=True)
class LayerParts:
    attention_norm: torch.Tensor
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    query_norm: torch.Tensor | None  # [head_dim], the same for each head
    key_norm: torch.Tensor | None
    attention_out: nn.Linear
    mlp_norm: torch.Tensor
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class StackParts:
    """Norm, attention, norm, gated SiLU: `layers` times, between an embedding and a final norm and head."""

    layers: Sequence[LayerParts]
    embedding: nn.Embedding
    final_norm: torch.Tensor
    head: nn.Linear
    rotary: nn.Module
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    attention_scaling: float

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def rotary_tables(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [num_positions, head_dim / 2], as the module makes them."""
        positions = torch.arange(num_positions)[None]
        cos, sin = self.rotary(torch.empty(0, dtype=torch.float32), position_ids=positions)
        half = self.head_dim // 2
        for table in (cos, sin):
            if table.shape != (1, num_positions, self.head_dim):
                raise NativeUnavailable(f"its rotary embedding turns {table.shape[-1]} of {self.head_dim}")
            if not torch.equal(table[..., :half], table[..., half:]):
                raise NativeUnavailable("its rotary embedding turns other pairs")
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def recognise(module: nn.Module, sliding_windows: Sequence[int | None]) -> StackParts:
    """`sliding_windows` are what each layer tells its attention. Raises NativeUnavailable with the reason."""
    kind = type(module).__module__.split(".")[-2]
    prefix = _FAMILIES.get(kind)
    if prefix is None:
        raise NativeUnavailable(f"{type(module).__name__} is no stack that they know")
    names = _Names(kind, prefix)
    names.check(module, "ForCausalLM")
    model = names.part(module, "model", "Model")
    layers = _children(model, "layers")
    attentions = [names.part(layer, "self_attn", "Attention") for layer in layers]
    head_dim, scaling = _one(attentions, "head_dim"), _one(attentions, "scaling")
    if head_dim % _HEAD_DIM_UNIT or head_dim > _MAX_HEAD_DIM:
        raise NativeUnavailable(
            f"a head of {head_dim} is no multiple of {_HEAD_DIM_UNIT} up to {_MAX_HEAD_DIM}"
        )
    norms = [child for child in model.modules() if names.is_part(child, "RMSNorm")]
    first = _linear(attentions[0], "q_proj"), _linear(attentions[0], "k_proj")
    head = _linear(module, "lm_head")
    if head.bias is not None:
        raise NativeUnavailable("its head has a bias")
    parts = StackParts(
        layers=[_layer(names, layer, window) for layer, window in zip(layers, sliding_windows, strict=True)],
        embedding=_embedding(model),
        final_norm=names.norm(model, "norm"),
        head=head,
        rotary=names.part(model, "rotary_emb", "RotaryEmbedding"),
        num_query_heads=first[0].out_features // int(head_dim),
        num_kv_heads=first[1].out_features // int(head_dim),
        head_dim=int(head_dim),
        norm_epsilon=_one(norms, "variance_epsilon"),
        attention_scaling=scaling,
    )
    _check_dtypes(module, parts.dtype)
    return parts


def _layer(names: _Names, layer: nn.Module, sliding_window: int | None) -> LayerParts:
    names.check(layer, "DecoderLayer")
    attention = names.part(layer, "self_attn", "Attention")
    mlp = names.part(layer, "mlp", "MLP")
    if type(mlp.get_submodule("act_fn")) not in _SILU:
        raise NativeUnavailable(f"its activation is {type(mlp.get_submodule('act_fn')).__name__}, not SiLU")
    has_head_norms = "q_norm" in dict(attention.named_children())
    return LayerParts(
        attention_norm=names.norm(layer, "input_layernorm"),
        query=_linear(attention, "q_proj"),
        key=_linear(attention, "k_proj"),
        value=_linear(attention, "v_proj"),
        query_norm=names.norm(attention, "q_norm") if has_head_norms else None,
        key_norm=names.norm(attention, "k_norm") if has_head_norms else None,
        attention_out=_linear(attention, "o_proj"),
        mlp_norm=names.norm(layer, "post_attention_layernorm"),
        gate=_linear(mlp, "gate_proj"),
        up=_linear(mlp, "up_proj"),
        down=_linear(mlp, "down_proj"),
        sliding_window=sliding_window,
    )


@dataclass(frozen=True, slots=True)
class _Names:
    """The classes of one family."""

    kind: str
    prefix: str

    def is_part(self, module: nn.Module, part: str) -> bool:
        wanted = f"transformers.models.{self.kind}.modeling_{self.kind}", f"{self.prefix}{part}"
        return (type(module).__module__, type(module).__qualname__) == wanted

    def check(self, module: nn.Module, part: str) -> None:
        if not self.is_part(module, part):
            raise NativeUnavailable(f"{type(module).__name__} stands where {self.prefix}{part} was expected")

    def part(self, parent: nn.Module, name: str, part: str) -> nn.Module:
        child = parent.get_submodule(name)
        self.check(child, part)
        return child

    def norm(self, parent: nn.Module, name: str) -> torch.Tensor:
        weight: torch.Tensor = self.part(parent, name, "RMSNorm").get_parameter("weight")
        return weight


def _children(parent: nn.Module, name: str) -> list[nn.Module]:
    return list(parent.get_submodule(name).children())


def _linear(parent: nn.Module, name: str) -> nn.Linear:
    child = parent.get_submodule(name)
    if type(child) is not nn.Linear:
        raise NativeUnavailable(f"{name} is {type(child).__name__}, no plain Linear")
    return child


def _embedding(model: nn.Module) -> nn.Embedding:
    child = model.get_submodule("embed_tokens")
    if type(child) is not nn.Embedding or child.max_norm is not None:
        raise NativeUnavailable(f"embed_tokens is {type(child).__name__}, no plain Embedding")
    return child


def _one(modules: Sequence[nn.Module], name: str) -> float:
    """An attribute that has to be the same number in all of them."""
    values: set[float] = {getattr(module, name) for module in modules}
    if len(values) != 1:
        raise NativeUnavailable(f"its layers differ in {name}")
    return values.pop()


def _check_dtypes(module: nn.Module, dtype: torch.dtype) -> None:
    others = {str(parameter.dtype) for parameter in module.parameters() if parameter.dtype is not dtype}
    if others:
        raise NativeUnavailable(f"its weights are {dtype} and {', '.join(sorted(others))}")
