"""Our own engine, in this process: the real scheduler and sampler, stepped as a worker's loop does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import NewToken, SequenceOutput, SequenceRequest, Until
from engine.reservations import BlockReservation
from engine.sampling import SamplingParams, StopConditions
from pdserve.bench.errors import BenchError
from pdserve.bench.rows import Plan, Row
from pdserve.bench.subject import Timed


def engine_config(rows: Sequence[Row], plan: Plan, max_num_batched_tokens: int) -> EngineConfig:
    """Room for the largest of the rows and one prompt more, which is prefilled beside the others."""
    block_size = EngineConfig().block_size
    num_blocks = max((row.batch + 1) * (-(-plan.max_tokens(row) // block_size) + 1) for row in rows)
    max_num_seqs = max(row.batch for row in rows) + 1
    return EngineConfig(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
        enable_prefix_caching=False,
    )


class OurEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = (f"bench-{number}" for number in itertools.count())
        self._begun: list[str] = []

    def prefill(self, prompt: Sequence[int]) -> Timed:
        began = time.perf_counter()
        self._run_prefill(_prefill_request(next(self._ids), prompt))
        return Timed(len(prompt), time.perf_counter() - began)

    def begin(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> None:
        """As on a decode worker: the KV of all prompts is there before the first of them decodes, so every
        step has the whole batch.
        """
        arrived = [self._arrive(prompt, num_new_tokens) for prompt in prompts]
        for prompt, (reservation, first) in zip(prompts, arrived, strict=True):
            request = _request(next(self._ids), prompt, num_new_tokens)
            self._engine.add_computed(request, reservation, first)
            self._begun.append(request.sequence_id)

    def decode(self, num_steps: int) -> Timed:
        num_left = dict.fromkeys(self._begun, num_steps)
        num_tokens = 0
        began = time.perf_counter()
        while any(left > 0 for left in num_left.values()):
            for output in self._step():
                num_left[output.sequence_id] -= len(output.new_tokens)
                num_tokens += len(output.new_tokens)
        return Timed(num_tokens, time.perf_counter() - began)

    def end(self) -> None:
        for sequence_id in self._begun:
            self._engine.cancel(sequence_id)
        self._begun.clear()

    def _arrive(self, prompt: Sequence[int], num_new_tokens: int) -> tuple[BlockReservation, NewToken]:
        """Prefills a prompt in blocks of its own and copies them into a reservation's."""
        held = replace(_prefill_request(next(self._ids), prompt), hold_blocks=True)
        first = self._run_prefill(held)
        reservation = self._engine.reserve(prompt, num_new_tokens)
        blocks = self._engine.pool.tensor
        source = self._engine.block_table(held.sequence_id)
        blocks[list(reservation.block_ids)] = blocks[list(source)]
        self._engine.release_hold(held.sequence_id)
        return reservation, first

    def _run_prefill(self, request: SequenceRequest) -> NewToken:
        self._engine.add(request)
        while True:
            for output in self._step():
                if output.is_last:
                    return output.new_tokens[0]

    def _step(self) -> tuple[SequenceOutput, ...]:
        outputs = self._engine.step().outputs
        for output in outputs:
            if output.error is not None:
                raise BenchError(output.error)
        if not outputs:
            raise BenchError("the engine has work that it cannot begin")
        return outputs


def _prefill_request(sequence_id: str, prompt: Sequence[int]) -> SequenceRequest:
    return replace(_request(sequence_id, prompt, 1), until=Until.FIRST_TOKEN)


def _request(sequence_id: str, prompt: Sequence[int], max_tokens: int) -> SequenceRequest:
    stop = StopConditions(max_tokens, ignore_eos=True)
    return SequenceRequest(sequence_id, tuple(prompt), (), SamplingParams(), stop)
