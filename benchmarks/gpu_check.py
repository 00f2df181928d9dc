"""Checks the engine on this machine's GPU, and measures it. From the root of the repository:

    python -m benchmarks.gpu_check [--model smollm2-135m]

Greedy tokens, in float32 and bfloat16, against transformers' own: with CUDA graphs, with FlexAttention alone,
and on torch alone. Then a prefill and a decode worker in this process, with KV shipped over gRPC. Then tokens
a second by batch, and the share of the memory rate, measured in the same run.

A token that the reference ranks lower is excused only as a tie, and ties are counted. Exit code 0: all is
well; 1: a token was wrong, or something failed; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.layout import DTYPES
from engine.loading import LoadedModel, load_model
from engine.request import SequenceRequest
from engine.sampling import SamplingParams, StopConditions
from engine.weights import resolve_model
from pdserve.bench.limits import read_shape
from pdserve.bench.ours import OurEngine
from pdserve.bench.work import decode_work
from tests.serving import serving

LENGTHS = (1, 15, 16, 17, 127, 128, 129, 500)
NUM_TOKENS = 32
MAX_MODEL_LEN = 1024
CONTEXT = 512
BATCHES = (1, 8, 32, 128)
# A second best counts as a tie so near the best score, as a share of that score: bfloat16 has 8 bits.
TIES = {"float32": 1e-4, "bfloat16": 2**-6}
COPIED_BYTES = 2**30


class Way(Enum):
    GRAPHS = "CUDA graphs"
    FLEX = "FlexAttention, no graphs"
    TORCH = "torch alone"


@dataclass
class Tally:
    num_tokens: int = 0
    num_ties: int = 0
    num_wrong: int = 0

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens, {self.num_ties} ties, {self.num_wrong} wrong"


class Reference:
    """transformers' own attention, on the same device, in the same dtype."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).to(device).eval()
        self._device = device
        self._tie = TIES[dtype]

    @torch.inference_mode()
    def count(self, prompt: Sequence[int], output: Sequence[int], tally: Tally) -> None:
        """Behind a tie the text goes its own way: each token is held against the scores of its own past."""
        ids = torch.tensor([prompt], device=self._device)
        greedy = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=len(output),
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
        tally.num_tokens += len(output)
        if greedy == list(output):
            return
        whole = torch.tensor([[*prompt, *output]], device=self._device)
        scores = self._model(whole).logits[0, len(prompt) - 1 : -1].float()
        for row, token_id in zip(scores, output, strict=True):
            best = float(row.max())
            behind = best - float(row[token_id])
            tally.num_ties += 0 < behind <= self._tie * abs(best)
            tally.num_wrong += behind > self._tie * abs(best)


@contextmanager
def going(way: Way) -> Iterator[None]:
    """Engines made meanwhile go this way, if the model's `compile` fits it."""
    if way is Way.FLEX:
        with patch("engine.cuda_start.GRAPH_SIZES", ()):
            yield
    else:
        yield


def load(model: str, dtype: str, device: str, way: Way) -> LoadedModel:
    return load_model(
        ModelConfig.model_validate(
            {
                "id": model,
                "dtype": dtype,
                "device": device,
                "max_model_len": MAX_MODEL_LEN,
                # on: what cannot be had is an error, not a slower way.
                "compile": "off" if way is Way.TORCH else "on",
            }
        )
    )


def make_engine(model: LoadedModel, way: Way, num_sequences: int) -> Engine:
    num_blocks = num_sequences * (CONTEXT // 16 + 8) + 64
    with going(way):
        return Engine(
            model,
            EngineConfig(
                num_blocks=num_blocks,
                max_num_seqs=num_sequences + 1,
                enable_prefix_caching=False,
                poison_blocks=True,
            ),
        )


def prompts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def check_tokens(model: LoadedModel, way: Way, reference: Reference) -> Tally:
    """All prompts at once, then the first few alone."""
    engine, tally = make_engine(model, way, len(LENGTHS)), Tally()
    asked = prompts(model.vocab_size, LENGTHS)
    for batch in (asked, asked[:1], asked[4:5]):
        for prompt, output in zip(batch, greedy_tokens(engine, batch), strict=True):
            reference.count(prompt, output, tally)
    engine.check_integrity()
    return tally


def greedy_tokens(engine: Engine, batch: Sequence[Sequence[int]]) -> list[list[int]]:
    stop = StopConditions(NUM_TOKENS, ignore_eos=True)
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(batch))}
    for sequence_id, prompt in zip(outputs, batch, strict=True):
        engine.add(SequenceRequest(sequence_id, tuple(prompt), (), SamplingParams(), stop))
    while engine.has_work:
        for output in engine.step().outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            outputs[output.sequence_id] += [token.token_id for token in output.new_tokens]
    return list(outputs.values())


async def check_hand_over(model: LoadedModel, reference: Reference) -> Tally:
    tally = Tally()
    asked = prompts(model.vocab_size, LENGTHS)
    settings = {"num_blocks": 512, "max_num_batched_tokens": 128, "max_num_seqs": len(LENGTHS)}
    async with serving(model.folder, model, transport="grpc", **settings) as cluster:
        answers = await asyncio.gather(
            *(
                cluster.client.generate(ids, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
                for ids in asked
            )
        )
    for prompt, answer in zip(asked, answers, strict=True):
        reference.count(prompt, list(answer.token_ids), tally)
    return tally


def copy_rate(device: str) -> float:
    """Bytes read and written a second, the best of ten copies."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * COPIED_BYTES / min(times)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_decode(model: LoadedModel, way: Way, batch: int, num_steps: int) -> tuple[float, float | None]:
    """Tokens a second, and bytes that a second must have read; None where the model's cannot be counted."""
    engine = make_engine(model, way, batch)
    ours = OurEngine(engine)
    ours.begin(prompts(model.vocab_size, [CONTEXT] * batch), num_steps + 16)
    ours.decode(8)  # graphs are recorded
    timed = ours.decode(num_steps)
    ours.end()
    shape = read_shape(model.folder, engine.layout)
    if shape is None:
        return timed.tok_s, None
    work = decode_work(shape, batch, CONTEXT + 8 + num_steps / 2)
    return timed.tok_s, work.num_bytes * num_steps / timed.seconds


def check(model: str, device: str, ways: Sequence[Way], dtypes: Sequence[str]) -> int:
    """Wrong tokens, all together."""
    num_wrong = 0
    folder = resolve_model(model)
    for dtype in dtypes:
        reference = Reference(folder, dtype, device)
        for way in ways:
            loaded = load(model, dtype, device, way)
            tally = check_tokens(loaded, way, reference)
            print(f"{dtype}, {way.value}: {tally}", flush=True)
            num_wrong += tally.num_wrong
        tally = asyncio.run(check_hand_over(load(model, dtype, device, ways[0]), reference))
        print(f"{dtype}, 1P1D over gRPC, {ways[0].value}: {tally}", flush=True)
        num_wrong += tally.num_wrong
    return num_wrong


def measure(
    model: str, device: str, ways: Sequence[Way], dtype: str, batches: Sequence[int], num_steps: int
) -> None:
    print(f"\n{dtype}, {CONTEXT} tokens of context\n\n| | batch | tok/s | share of the memory rate |")
    print("|---|---|---|---|")
    for way in ways:
        loaded = load(model, dtype, device, way)
        for batch in batches:
            rate = copy_rate(device)
            tok_s, bytes_s = measure_decode(loaded, way, batch, num_steps)
            share = "" if bytes_s is None else f"{bytes_s / rate:.2f} of {rate / 1e9:.0f} GB/s"
            print(f"| {way.value} | {batch} | {tok_s:.0f} | {share} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="as in the YAML (default: %(default)s)")
    parser.add_argument(
        "--rehearse", action="store_true", help="run on the CPU, on torch alone: tries this script, not a GPU"
    )
    options = parser.parse_args(arguments)
    if options.rehearse:
        num_wrong = check(options.model, "cpu", [Way.TORCH], ["float32"])
        measure(options.model, "cpu", [Way.TORCH], "float32", [1], 4)
    elif torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
        num_wrong = check(options.model, "cuda", list(Way), list(TIES))
        measure(options.model, "cuda", list(Way), "bfloat16", BATCHES, 64)
    else:
        print("torch finds no GPU here: nothing was checked", file=sys.stderr)
        return 2
    print("all tokens are right" if num_wrong == 0 else f"{num_wrong} tokens are wrong")
    return 0 if num_wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
