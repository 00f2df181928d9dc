"""bfloat16 linears on a CPU, with their weights in the order in which oneDNN reads them.

A plain `nn.Linear` of a few rows reads its weights at half the memory's rate, and they are nearly all that
decoding reads. float32 stays as it is: there the plain model is what others are compared with.
"""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)


class PackedLinear(torch.nn.Module):
    """The same product as the `nn.Linear` it is made of, which can be dropped afterwards."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[…, in_features] → […, out_features]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self.bias, "none", [], ""
        )
        return result


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cpu"
        and dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@torch.inference_mode()
def pack_linears(module: torch.nn.Module) -> int:
    """Puts a PackedLinear in place of every plain Linear inside `module`; how many. Subclasses of Linear do
    something else with their weights and stay.
    """
    places = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()  # named_children leaves out a second place
        if type(child) is torch.nn.Linear
    ]
    packed = {child: PackedLinear(child) for _, _, child in places}
    for parent, name, child in places:
        setattr(parent, name, packed[child])
    for parameter in module.parameters():
        # One parameter left in the mapped file would keep all of it in memory, beside the packed copy.
        parameter.data = parameter.data.clone()
    log.info("packed %d linears for oneDNN", len(places))
    return len(places)
