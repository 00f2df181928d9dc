"""Ways to drive an engine in a test, and the plain reference to compare it with."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine.engine import BlockReservation, Engine
from engine.noise import gumbel, noise_key
from engine.request import NewToken, SequenceOutput, SequenceRequest, Until
from engine.sampling import SamplingParams, StopConditions
from tests.models import END_OF_TEXT

_ids = itertools.count()
# Float32 kernels differ in the last bits between batch shapes: two best scores nearer than this are a tie.
TIE = 1e-3


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(0, END_OF_TEXT, (length,), generator=generator).tolist())


def request(
    prompt_token_ids: Sequence[int],
    max_tokens: int = 20,
    *,
    known: Sequence[int] = (),
    sampling: SamplingParams | None = None,
    ignore_eos: bool = True,
    **fields: object,
) -> SequenceRequest:
    made = SequenceRequest(
        sequence_id=f"s{next(_ids)}",
        prompt_token_ids=tuple(prompt_token_ids),
        known_token_ids=tuple(known),
        sampling=sampling or SamplingParams(),
        stop=StopConditions(max_tokens, ignore_eos=ignore_eos),
    )
    return replace(made, **fields)


def drain(engine: Engine, max_steps: int = 2000) -> dict[str, list[SequenceOutput]]:
    """Steps until nothing lives; every output by sequence."""
    outputs: dict[str, list[SequenceOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        result = engine.step()
        assert result.outputs, "the engine stalls"
        for output in result.outputs:
            outputs.setdefault(output.sequence_id, []).append(output)
    raise AssertionError("no end in sight")


def tokens_of(outputs: Iterable[SequenceOutput]) -> list[NewToken]:
    outputs = list(outputs)
    assert all(output.error is None for output in outputs)
    assert [output.is_last for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return [token for output in outputs for token in output.new_tokens]


def generate(engine: Engine, *requests: SequenceRequest) -> list[list[int]]:
    """New token ids of each request, all run together."""
    for item in requests:
        engine.add(item)
    outputs = drain(engine)
    results: list[list[int]] = []
    for item in requests:
        tokens = tokens_of(outputs[item.sequence_id])
        first = len(item.known_token_ids)
        assert [token.position for token in tokens] == list(range(first, first + len(tokens)))
        results.append([token.token_id for token in tokens])
    return results


def preempt(engine: Engine) -> None:
    """Adds sequences that outgrow eight blocks of 16, and stops as soon as one was preempted."""
    for seed in range(3):
        engine.add(request(prompt(30, seed), 60))
    while engine.snapshot().num_preemptions == 0:
        engine.step()


def reserve(engine: Engine, item: SequenceRequest) -> BlockReservation:
    ids = (*item.prompt_token_ids, *item.known_token_ids)
    return engine.reserve(ids, item.stop.max_tokens - len(item.known_token_ids))


def prefill(engine: Engine, item: SequenceRequest) -> tuple[NewToken, SequenceRequest]:
    """The first token, with the blocks still held under the returned request's id."""
    held = replace(item, sequence_id=f"{item.sequence_id}/p", until=Until.FIRST_TOKEN, hold_blocks=True)
    engine.add(held)
    (token,) = tokens_of(drain(engine)[held.sequence_id])
    return token, held


def hand_over(source: Engine, target: Engine, item: SequenceRequest) -> tuple[NewToken, BlockReservation]:
    reservation = reserve(target, item)
    first, held = prefill(source, item)
    table = source.block_table(held.sequence_id)
    assert len(table) == len(reservation.block_ids)
    for index in range(reservation.num_cached_blocks, len(table)):
        target.pool.block_view(reservation.block_ids[index])[:] = source.pool.block_view(table[index])
    source.release_hold(held.sequence_id)
    target.add_computed(item, reservation, first)
    return first, reservation


class Reference:
    """transformers' own forward over the whole sequence for every token: no cache, no batch, no paging."""

    def __init__(self, folder: Path, attention: str | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        )

    @torch.inference_mode()
    def scores(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[n, V] after each token."""
        return self.model(torch.tensor([list(token_ids)])).logits[0]

    def generate(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt_token_ids)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        return out[0, len(prompt_token_ids) :].tolist()

    def assert_follows(
        self,
        prompt_token_ids: Sequence[int],
        output: Sequence[int],
        sampling: SamplingParams | None = None,
    ) -> None:
        """Every output token is the best by the reference's (perturbed) score, or ties with it."""
        sampling = sampling or SamplingParams()
        logits = self.scores([*prompt_token_ids, *output])[len(prompt_token_ids) - 1 : -1]
        for position, token_id in enumerate(output):
            scores = logits[position]
            if not sampling.is_greedy:
                key = torch.tensor([[noise_key(sampling.seed, position)]])
                scores = scores / sampling.temperature + gumbel(key, torch.arange(len(scores))[None])[0]
            best = scores.max()
            if scores[token_id] != best:
                assert best - scores[token_id] < TIE, f"position {position}: {token_id} is not the best token"
                print(f"tie at position {position}: {token_id} and {int(scores.argmax())}")  # noqa: T201  # ties are told
