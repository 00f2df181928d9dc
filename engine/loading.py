"""A folder of weights → a model whose attention is ours, checked to be one that we can run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.architecture import building, check_context, choose_dtype, read_config, stored_dtype
from engine.attention import ATTENTION_NAME
from engine.config import ModelConfig
from engine.errors import BrokenModel, ModelError, NativeUnavailable
from engine.fingerprint import model_fingerprint
from engine.layout import DTYPES, KVLayout
from engine.model_files import read_json
from engine.model_probe import ModelShape, probe_model
from engine.module_run import ModuleRun
from engine.native.decoder import NativeDecoder
from engine.native.library import NativeLibrary
from engine.native.load import Compile, NativeDiffers, library_for, make_decoder
from engine.native.verify import BLOCK_SIZE
from engine.packed_linear import can_pack, pack_linears
from engine.weights import no_progress, resolve_model

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Runs by `decoder` where our kernels know its layers, else by `module`: the other is None."""

    module: torch.nn.Module | None
    folder: Path
    device: torch.device
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    fingerprint: str
    decoder: NativeDecoder | None = None
    # Our kernels, where this machine has them for this model.
    library: NativeLibrary | None = None
    compile: Compile = "auto"
    # What computes: "compiled", or what instead of it and why.
    kernels: str = "torch"

    def layout(self, block_size: int) -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=self.dtype,
            model_fingerprint=self.fingerprint,
        )


def load_model(config: ModelConfig, progress: Callable[[str], None] = no_progress) -> LoadedModel:
    """Raises ModelError; the message names the file or what is missing."""
    folder = resolve_model(config.id, progress)
    hf_config = read_config(folder)
    device = _device(config.device)
    dtype = choose_dtype(config.dtype, stored_dtype(hf_config), device.type == "cuda")
    max_model_len = check_context(hf_config, config.max_model_len)
    if max_model_len is None:
        raise ModelError(f"{hf_config.model_type} names no context length: set max_model_len")
    progress(f"loading {config.id} as {dtype} on {device}")
    module = _module(folder, hf_config, dtype, device)
    shape = probe_model(module, hf_config, device)
    model = LoadedModel(
        module=module,
        folder=folder,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=_eos_token_ids(folder, hf_config),
        num_layers=hf_config.num_hidden_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        fingerprint=model_fingerprint(folder, dtype),
        compile=config.compile,
    )
    kernels = library_for(config.compile, device, DTYPES[dtype], progress)
    model = replace(model, library=kernels.library, kernels=kernels.told)
    if kernels.library is not None:
        try:
            return _with_decoder(model, module, kernels.library, shape)
        except NativeDiffers as error:
            if config.compile == "on":
                raise ModelError(
                    f"compile: on was asked for, and our decoder of {hf_config.model_type} is wrong: {error}"
                ) from error
            log.warning("%s runs without our decoder: %s", hf_config.model_type, error)
            model = replace(model, kernels=f"compiled attention: {error}")
            module = _module(folder, hf_config, dtype, device)
        except NativeUnavailable as error:
            log.info("%s runs by transformers' layers, not by our kernels': %s", hf_config.model_type, error)
            model = replace(model, kernels=f"compiled attention: {error}")
    if can_pack(device, DTYPES[dtype]):
        pack_linears(module)
    return replace(model, module=module)


def _with_decoder(
    model: LoadedModel, module: torch.nn.Module, library: NativeLibrary, shape: ModelShape
) -> LoadedModel:
    decoder = make_decoder(
        module,
        ModuleRun(module).run,
        shape.sliding_windows,
        model.layout(BLOCK_SIZE),
        model.max_model_len,
        library,
    )
    return replace(model, module=None, decoder=decoder)


def _module(folder: Path, hf_config: PreTrainedConfig, dtype: str, device: torch.device) -> torch.nn.Module:
    kind = hf_config.model_type
    with building(f"{kind} in {folder}"):
        # With output_loading_info it gives a pair, which its annotations do not say.
        loaded: object = AutoModelForCausalLM.from_pretrained(
            folder,
            config=hf_config,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    module, report = cast("tuple[torch.nn.Module, Mapping[str, Collection[str]]]", loaded)
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would fill them with random numbers
        raise BrokenModel(f"the weights in {folder} lack {len(missing)} tensors of {kind}, like {missing[0]}")
    module.to(device)
    return module.eval().requires_grad_(False)


def _device(wanted: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ModelError("device: cuda was asked for, and torch finds none here")
    return torch.device("cuda" if has_cuda and wanted != "cpu" else "cpu")


def _eos_token_ids(folder: Path, hf_config: PreTrainedConfig) -> frozenset[int]:
    """generation_config.json knows a chat model's end of turn; config.json is the fallback."""
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        path, found = folder / "config.json", hf_config.eos_token_id
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(each, int) for each in ids):
        raise BrokenModel(f"{path}: eos_token_id is {found!r}, no token id and no list of them")
    return frozenset(ids)
