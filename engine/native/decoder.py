"""A recognised model's weights in the kernels' order, and steps through them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from engine.batch import PackedBatch
from engine.huge_pages import Slabs
from engine.layer_watch import LayerWatch
from engine.native.library import (
    LayerWeights,
    ModelWeights,
    NativeError,
    NativeLibrary,
    Step,
)
from engine.native.recognise import LayerParts, StackParts
from engine.native.views import view_pool, view_rows
from engine.progress import Progress

# Columns of gate and up that lie side by side: those that one tile multiplies.
_GATE_UNIT = 16


class NativeDecoder:
    """Weights only: any number of engines may use it, each with a NativeRun of its own."""

    def __init__(self, parts: StackParts, library: NativeLibrary, max_model_len: int) -> None:
        """Takes the weights out of the module, layer by layer, so that memory holds them once: afterwards the
        module is empty. Raises NativeUnavailable, with the module whole, for what the kernels do not compute.
        """
        library.check_dtype(parts.dtype)
        cosines, sines = parts.rotary_tables(max_model_len)
        self.library = library
        self.dtype = parts.dtype
        self.num_layers = len(parts.layers)
        self.vocab_size, hidden = parts.embedding.weight.shape
        self._tensors: list[torch.Tensor] = []  # what `weights` points at
        self._slabs = Slabs()
        intermediate = parts.layers[0].gate.out_features
        head = self._packed(parts.head.weight)
        embedding = parts.embedding.weight.detach().clone()
        _empty(parts.head, parts.embedding)
        layers = (LayerWeights * self.num_layers)(*(self._layer(layer) for layer in parts.layers))
        self.weights = ModelWeights(
            is_bf16=self.dtype is torch.bfloat16,
            num_layers=self.num_layers,
            hidden=hidden,
            intermediate=intermediate,
            num_query_heads=parts.num_query_heads,
            num_kv_heads=parts.num_kv_heads,
            head_dim=parts.head_dim,
            vocab=self.vocab_size,
            norm_epsilon=parts.norm_epsilon,
            attention_scaling=parts.attention_scaling,
            layers=layers,
            embedding=self._kept(embedding),
            cosines=self._kept(cosines),
            sines=self._kept(sines),
            final_norm=self._kept(_float(parts.final_norm)),
            head=head,
        )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def _layer(self, parts: LayerParts) -> LayerWeights:
        qkv = (parts.query, parts.key, parts.value)
        weights = LayerWeights(
            attention_norm=self._kept(_float(parts.attention_norm)),
            qkv=self._packed(torch.cat([each.weight for each in qkv])),
            qkv_bias=self._bias(torch.cat, qkv),
            query_norm=None if parts.query_norm is None else self._kept(_float(parts.query_norm)),
            key_norm=None if parts.key_norm is None else self._kept(_float(parts.key_norm)),
            attention_out=self._packed(parts.attention_out.weight),
            attention_out_bias=self._bias(torch.cat, (parts.attention_out,)),
            mlp_norm=self._kept(_float(parts.mlp_norm)),
            gate_up=self._packed(_side_by_side((parts.gate.weight, parts.up.weight))),
            gate_up_bias=self._bias(_side_by_side, (parts.gate, parts.up)),
            down=self._packed(parts.down.weight),
            down_bias=self._bias(torch.cat, (parts.down,)),
            sliding_window=parts.sliding_window or 0,
        )
        _empty(*qkv, parts.attention_out, parts.gate, parts.up, parts.down)
        return weights

    def _packed(self, weight: torch.Tensor) -> int:
        return self._kept(self.library.pack(weight.detach(), self._slabs).data)

    def _bias(
        self, join: Callable[[list[torch.Tensor]], torch.Tensor], linears: Sequence[nn.Linear]
    ) -> int | None:
        if all(each.bias is None for each in linears):
            return None
        biases = [
            torch.zeros(each.out_features) if each.bias is None else _float(each.bias) for each in linears
        ]
        return self._kept(join(biases))

    def _kept(self, tensor: torch.Tensor) -> int:
        """Its address, good as long as this decoder lives."""
        self._tensors.append(tensor)
        return tensor.data_ptr()


class NativeRun:
    """One engine's steps. Not for two threads at once."""

    def __init__(self, decoder: NativeDecoder, progress: Progress | None = None) -> None:
        self._decoder = decoder
        self._progress = progress or Progress()
        self._workspace = decoder.library.new_workspace()
        weakref.finalize(self, decoder.library.free_workspace, self._workspace)

    def run(self, batch: PackedBatch, watch: LayerWatch | None = None) -> torch.Tensor:
        """Logits, float32 [R, vocab]; K and V go into the pool. `watch` is told between groups of layers."""
        first = 0
        if watch is not None:
            for stop in watch.stops:
                if stop > first:
                    self.run_layers(batch, range(first, stop))
                watch.tell(stop)
                first = stop
        return self.run_layers(batch, range(first, self._decoder.num_layers))

    def run_layers(self, batch: PackedBatch, layers: range) -> torch.Tensor:
        """Some neighbouring layers of a step, so that something can be done between groups of them: the
        groups of one step come in order, with no other step between them. Behind the last layer, logits;
        before that, nothing is written to what is returned. Raises NativeError.
        """
        decoder = self._decoder
        if layers.start == 0:
            _check_token_ids(batch.input_ids, decoder.vocab_size)
        logits = torch.empty(len(batch.logit_rows), decoder.vocab_size)
        step = Step(
            num_threads=torch.get_num_threads(),
            first_layer=layers.start,
            last_layer=layers.stop,
            num_rows=batch.input_ids.numel(),
            token_ids=batch.input_ids.data_ptr(),
            positions=batch.position_ids.data_ptr(),
            num_logits=len(batch.logit_rows),
            logit_rows=batch.logit_rows.data_ptr(),
            logits=logits.data_ptr(),
            pool=view_pool(batch.paged.pool),
            paged=view_rows(batch.paged),
            progress=self._progress.address,
        )
        decoder.library.run_layers(decoder.weights, self._workspace, step)
        return logits


def _check_token_ids(token_ids: torch.Tensor, vocab_size: int) -> None:
    """The kernels read the row that an id names, wherever in memory that is."""
    least, largest = (int(each) for each in token_ids.aminmax())
    if least < 0 or largest >= vocab_size:
        raise NativeError(f"token ids {least} to {largest} reach outside the vocabulary of {vocab_size}")


def _side_by_side(pair: Sequence[torch.Tensor]) -> torch.Tensor:
    """[I, …] of gate and of up → 16 rows of the one, 16 of the other, and so on; padded with zeros."""
    gate, up = pair
    missing = -len(gate) % _GATE_UNIT
    padded = [torch.cat([each, each.new_zeros(missing, *each.shape[1:])]) for each in (gate, up)]
    units = [each.view(-1, _GATE_UNIT, *each.shape[1:]) for each in padded]
    return torch.stack(units, dim=1).flatten(0, 2)


def _float(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, so that nothing holds on to the module's memory."""
    return tensor.detach().to(torch.float32, copy=True)


def _empty(*modules: nn.Module) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.data = parameter.data.new_empty(0)
