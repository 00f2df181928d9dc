"""Packed linears beside the plain ones they stand for."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.loading import load_model
from engine.packed_linear import PackedLinear, can_pack, pack_linears
from tests.families import SERVED
from tests.models import tiny_model
from tests.unit.engine.driving import generate, prompt, request

CPU = torch.device("cpu")
needs_bfloat16 = pytest.mark.skipif(
    not can_pack(CPU, torch.bfloat16), reason="oneDNN has no bfloat16 on this processor"
)


def random_rows(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(1, num_rows, width, generator=torch.Generator().manual_seed(num_rows)).bfloat16()


@needs_bfloat16
@pytest.mark.parametrize("num_rows", [1, 3, 8, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_the_plain_linear(num_rows, has_bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80, bias=has_bias, dtype=torch.bfloat16)
    rows = random_rows(num_rows, 48)
    with torch.inference_mode():
        expected = torch.nn.functional.linear(
            rows.float(), linear.weight.float(), linear.bias.float() if has_bias else None
        )
        torch.testing.assert_close(PackedLinear(linear)(rows).float(), expected, atol=0.01, rtol=0.01)


@needs_bfloat16
def test_only_plain_linears_are_packed_and_a_shared_one_once():
    class Special(torch.nn.Linear):
        pass

    shared = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
    module = torch.nn.ModuleDict({"one": shared, "other": shared, "special": Special(16, 16)})
    assert pack_linears(module) == 2
    assert type(module["special"]) is Special
    assert type(module["one"]) is PackedLinear
    assert module["one"] is module["other"]


@needs_bfloat16
@pytest.mark.parametrize("family", [family.name for family in SERVED])
def test_every_family_runs_packed_in_bfloat16_and_plain_in_float32(tmp_path, family):
    folder = tiny_model(tmp_path, family=family)
    plain = load_model(ModelConfig(id=str(folder), device="cpu", dtype="float32", compile="off"))
    packed = load_model(ModelConfig(id=str(folder), device="cpu", dtype="bfloat16", compile="off"))
    assert not any(isinstance(each, PackedLinear) for each in plain.module.modules())
    assert any(isinstance(each, PackedLinear) for each in packed.module.modules())
    assert not any(type(each) is torch.nn.Linear for each in packed.module.modules())
    generate(Engine(packed, EngineConfig(num_blocks=16, max_num_batched_tokens=32)), request(prompt(40), 4))
