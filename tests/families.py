"""The model families that the tests build, what each asks of an attention, and which are refused and why.

`docs/families.md` is written from here (`python -m tests.families`); a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

DOC = Path(__file__).parents[1] / "docs" / "families.md"
WINDOW = 24  # shorter than the tests' prompts

LLAMA_LIKE: Mapping[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_SLIDING = {"sliding_window": WINDOW}
_SLIDING_SECOND = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_SLIDING_FIRST = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


class Need(Enum):
    """What an attention must honour beside softmax(QKᵀ/√d)V."""

    SCALING = "a scaling of its own"
    WINDOW = "sliding window"
    SOFT_CAP = "soft cap"
    SINKS = "attention sinks"


@dataclass(frozen=True)
class Family:
    name: str  # transformers' model_type
    needs: frozenset[Need] = frozenset()
    # The tiny model's config, over LLAMA_LIKE; with `shape` instead of it.
    settings: Mapping[str, object] = field(default_factory=dict)
    shape: Mapping[str, object] = field(default_factory=lambda: LLAMA_LIKE)
    # Refused at load, with a message that matches this.
    refusal: str | None = None
    why: str = ""

    @property
    def config(self) -> dict[str, object]:
        return {**self.shape, **self.settings}


def _served(name: str, *needs: Need, **settings: object) -> Family:
    return Family(name, frozenset(needs), settings)


SERVED = (
    _served("cohere"),
    _served("exaone4", Need.WINDOW, **_SLIDING_FIRST),
    _served("gemma2", Need.SCALING, Need.WINDOW, Need.SOFT_CAP, query_pre_attn_scalar=32,
            attn_logit_softcapping=2.0, final_logit_softcapping=5.0, **_SLIDING),
    _served("gemma3_text", Need.SCALING, Need.WINDOW, query_pre_attn_scalar=32, **_SLIDING_FIRST),
    _served("glm4"),
    Family("gpt2", shape={"n_embd": 64, "n_layer": 2, "n_head": 4}),
    _served("gpt_neox"),
    _served("gpt_oss", Need.WINDOW, Need.SINKS, num_local_experts=4, num_experts_per_tok=2, **_SLIDING),
    _served("granite", Need.SCALING, attention_multiplier=0.5),
    _served("llama"),
    _served("mistral", Need.WINDOW, **_SLIDING),
    _served("olmo2"),
    _served("opt", Need.SCALING, ffn_dim=128, word_embed_proj_dim=64),
    _served("phi3", Need.WINDOW, **_SLIDING),
    _served("qwen2", Need.WINDOW, **_SLIDING_SECOND),
    _served("qwen3", Need.WINDOW, **_SLIDING_SECOND),
    _served("qwen3_moe", Need.WINDOW, **_SLIDING_SECOND, **_EXPERTS),
    _served("smollm3", Need.WINDOW, use_sliding_window=True, no_rope_layers=[1, 0], **_SLIDING),
    _served("starcoder2", Need.WINDOW, **_SLIDING),
)  # fmt: skip


def _refused(name: str, refusal: str, why: str, **settings: object) -> Family:
    return Family(name, settings=settings, refusal=refusal, why=why)


_OWN = "do not call the attention interface"
_RECURRENT = "its layers are recurrent: their context is no KV cache"

REFUSED = (
    _refused("bert", "not causal", "its tokens see those behind them"),
    _refused("bart", "encoder-decoder|outside its attention", "made for an encoder; counts positions by row"),
    _refused("bloom", _OWN, "brings an attention of its own, with ALiBi"),
    _refused("deepseek_v3", "K and V heads differ in size: 24 and 16", "K and V heads differ in size",
             head_dim=8, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
             topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1, kv_lora_rank=32,
             q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16),
    Family("falcon", shape={"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
           refusal="does not call the attention interface", why="brings attentions of its own"),
    _refused("falcon_h1", r"\['hybrid'\]", "each layer has a recurrence beside its attention", mamba_d_ssm=64,
             mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16),
    _refused("jamba", _OWN, "some of its layers are recurrent", num_experts=4, attn_layer_offset=1,
             attn_layer_period=2),
    _refused("llama4_text", r"\['chunked_attention'\]", "some layers see only their own chunk of the context",
             attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=64),
    _refused("mamba", _OWN, _RECURRENT),
    _refused("rwkv", _OWN, _RECURRENT),
    _refused("stablelm", "does not pass keyword arguments", "does not pass block tables on to its layers"),
)  # fmt: skip

FAMILIES = {family.name: family for family in (*SERVED, *REFUSED)}

_HEAD = """\
# Model families

Written by `python -m tests.families` from the families that the tests build; a test keeps it so.

Any decoder-only architecture of transformers that uses its attention interface is served. For each family
here a tiny random model, in float32, gives transformers' own tokens and log probabilities: by chunked prefill
and batched decode, when it is resumed behind known tokens, and when its KV is handed to another engine block
by block. Sliding windows are shorter than the prompts there, soft caps and sinks are felt, and a test shows
that leaving any of them out would change the result.

What cannot be honoured is refused when the model is loaded, by a message with its name and the reason. A few
tokens tell, not the name: a family that is in neither table is checked in the same way.

## Served

| family | what its attention must honour |
|---|---|
"""
_REFUSED_HEAD = """
## Refused

| family | reason |
|---|---|
"""


def document() -> str:
    served = [f"| {family.name} | {_needs(family)} |" for family in SERVED]
    refused = [f"| {family.name} | {family.why} |" for family in REFUSED]
    return _HEAD + "\n".join(served) + "\n" + _REFUSED_HEAD + "\n".join(refused) + "\n"


def _needs(family: Family) -> str:
    return ", ".join(need.value for need in Need if need in family.needs) or "nothing special"


if __name__ == "__main__":
    DOC.parent.mkdir(exist_ok=True)
    DOC.write_text(document(), encoding="utf-8")
