"""A prefill and a decode worker that share one GPU, on the real command line: KV goes by pinned buffers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve import Client
from tests.cluster.commands import Commands, free_port
from tests.models import VOCAB_SIZE, tiny_model

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
# Of prompts: under, at and over a block's and a chunk's border.
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 300)
NUM_TOKENS = 24


def write_config(folder: Path, model: Path, port: int) -> Path:
    path = folder / "one-gpu.yaml"
    path.write_text(
        f"""\
name: one-gpu
model: {{id: "{model}", dtype: float32, device: cuda, max_model_len: 1024}}
router: {{grpc: "127.0.0.1:{port}"}}
pools:
  prefill:
    resources: {{num_cpus: 1, num_gpus: 0.5}}
    engine: {{num_blocks: 256, max_num_batched_tokens: 128}}
  decode:
    resources: {{num_cpus: 1, num_gpus: 0.5}}
    engine: {{num_blocks: 256, max_num_seqs: 16}}
"""
    )
    return path


def reference(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' own greedy tokens, on the same GPU."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to("cuda").eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        answer = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        answers.append(answer[0, len(prompt) :].tolist())
    return answers


async def ask(address: str, prompts: list[list[int]]) -> list[list[int]]:
    """The first alone, the others at once."""

    async def one(prompt: list[int]) -> list[int]:
        answer = await client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        (completion,) = answer.completions
        assert completion.num_resumes == 0
        assert (completion.prefill_worker, completion.decode_worker) == ("prefill-0", "decode-0")
        return list(answer.token_ids)

    async with Client(address) as client:
        first = await one(prompts[0])
        return [first, *await asyncio.gather(*map(one, prompts[1:]))]


def test_two_workers_on_one_gpu_give_the_tokens_of_the_reference(commands: Commands, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
    model = tiny_model(tmp_path / "model")
    port = free_port()
    commands.succeed("up", str(write_config(commands.home, model, port)))
    answers = asyncio.run(ask(f"127.0.0.1:{port}", prompts))
    status = json.loads(commands.succeed("status", "--json"))
    commands.succeed("down", "one-gpu")
    prefill, decode = (status["pools"][role]["workers"][0] for role in ("prefill", "decode"))
    assert (prefill["device"], decode["device"]) == ("cuda", "cuda")
    assert prefill["kv_bytes_sent"] == decode["kv_bytes_received"] > 0
    assert decode["tokens_prefilled"] == 0
    assert [(route["to"], route["transport"]) for route in prefill["kv_routes"]] == [("decode-0", "grpc")]
    assert answers == reference(model, prompts)
