"""Tiny models with random weights and a real byte-level tokenizer: the whole path without a download."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import FAMILIES

VOCAB_SIZE = 512
END_OF_TEXT, IM_START, IM_END, PAD = 508, 509, 510, 511
MAX_LEN = 2048

_SPECIALS = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END, "<|pad|>": PAD}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(root: Path, family: str = "llama", *, seed: int = 0, **overrides: object) -> Path:
    """Writes a model folder (config, float32 safetensors, tokenizer, chat template) and returns it.

    The weights are spread wide enough that greedy output is neither constant nor full of ties.
    """
    folder = root / f"tiny-{family}-{seed}"
    shape = {"n_positions" if family == "gpt2" else "max_position_embeddings": MAX_LEN}
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB_SIZE,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=[END_OF_TEXT, IM_END],
        pad_token_id=PAD,
        **(shape | FAMILIES[family].config | overrides),
    )
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.set_rng_state(generator_state)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """256 bytes, 252 pairs of letters that merge, 4 specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges = list(itertools.islice(itertools.product(letters, letters), END_OF_TEXT - len(alphabet)))
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIALS))
    if any(tokenizer.token_to_id(token) != token_id for token, token_id in _SPECIALS.items()):
        raise AssertionError("the special tokens moved")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
