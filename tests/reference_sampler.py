"""What a request must be answered with, worked out slowly in one process: one sequence, a whole forward for
each token, one rule after the other in float64. It shares no code with the sampler or the router.

Options are the client's keywords. Two answers differ legitimately only where the reference's own choice was
within `TIE`: such ties are printed, and the stream is compared up to there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from pdserve.client import Completion, FinishReason
from pdserve.requests import GenerateOptions
from tests.models import END_OF_TEXT, IM_END
from tests.unit.engine.driving import TIE, Reference

EOS = (END_OF_TEXT, IM_END)
IMPOSSIBLE = -math.inf
# How far a border (of top-k, top-p, min-p) may move for kernels that add up in another order.
BORDER = 1e-4
_64_BITS = 2**64 - 1


def next_scores(
    logits: torch.Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    options: GenerateOptions,
    slack: float = 0.0,
) -> torch.Tensor:
    """logits [V] behind prompt and output → the score of each token; the best one is drawn. `slack` moves
    the borders of the cuts outwards.
    """
    scores = logits.to(torch.float64, copy=True)
    for token, bias in options.get("logit_bias", {}).items():
        scores[token] += bias
    for token in {*prompt, *output}:
        penalty = options.get("repetition_penalty", 1.0)
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= options.get("presence_penalty", 0.0)
        scores[token] -= options.get("frequency_penalty", 0.0) * output.count(token)
    if len(output) < options.get("min_tokens", 0):
        for token in (*options.get("stop_token_ids", ()), *(() if options.get("ignore_eos") else EOS)):
            scores[token] = IMPOSSIBLE
    temperature = options.get("temperature", 1.0)
    if temperature == 0:
        return scores
    scores /= temperature
    _cut(scores, options, slack)
    for token in scores.isfinite().nonzero().flatten().tolist():
        scores[token] += noise(options["seed"], len(output), token)
    return scores


def _cut(scores: torch.Tensor, options: GenerateOptions, slack: float) -> None:
    top_k = options.get("top_k", 0)
    if 0 < top_k < len(scores):
        border = sorted(scores.tolist(), reverse=True)[top_k - 1]
        scores[scores < border - slack] = IMPOSSIBLE
    if options.get("top_p", 1.0) < 1.0:
        probabilities = scores.softmax(0)
        mass = 0.0
        for probability in sorted(probabilities.tolist(), reverse=True):
            border = probability
            mass += probability
            if mass >= options["top_p"] + slack:
                break
        scores[probabilities < border] = IMPOSSIBLE
    if options.get("min_p", 0.0) > 0.0:
        probabilities = scores.softmax(0)
        scores[probabilities < options["min_p"] * (1 - slack) * probabilities.max()] = IMPOSSIBLE


def noise(seed: int, position: int, token: int) -> float:
    """Gumbel noise from SplitMix64: its stream is started from (seed, position), and read at the token."""
    key = _mix(_mix(seed) + position * 0x9E3779B97F4A7C15)
    uniform = ((_mix(key + (token + 1) * 0x9E3779B97F4A7C15) >> 11) + 0.5) / 2**53
    return -math.log(-math.log1p(-min(uniform, 1 - 2**-24)))


def seed_of(seed: int, index: int) -> int:
    """Of one of n sequences: the first has the request's own."""
    text = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") if index else seed


def _mix(number: int) -> int:
    number &= _64_BITS
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _64_BITS
    return number ^ (number >> 31)


@dataclass(frozen=True)
class Expected:
    token_ids: list[int]
    logits: list[torch.Tensor]  # [V] before each token
    text: str
    finish_reason: FinishReason
    matched: str | int | None


class ReferenceSampler:
    def __init__(self, folder: Path) -> None:
        self._reference = Reference(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._known: dict[str, Expected] = {}
        self.num_ties = 0

    def check(
        self, prompt: Sequence[int], options: GenerateOptions, completions: Sequence[Completion]
    ) -> None:
        assert [each.index for each in completions] == list(range(options.get("n", 1)))
        for each in completions:
            seeded: GenerateOptions = {**options, "seed": seed_of(options["seed"], each.index)}
            self._check_one(prompt, seeded, each)

    def _check_one(self, prompt: Sequence[int], options: GenerateOptions, answer: Completion) -> None:
        expected = self.generate(prompt, options)
        same = _num_same(expected.token_ids, answer.token_ids)
        self._check_logprobs(expected, options, answer, same)
        if same < max(len(expected.token_ids), len(answer.token_ids)):
            self._check_tie(prompt, options, expected, answer, same)
            return
        assert answer.text == expected.text
        assert answer.finish_reason is expected.finish_reason
        matched = answer.matched_token_id if answer.matched_stop is None else answer.matched_stop
        assert matched == expected.matched
        assert answer.usage.completion_tokens == len(answer.token_ids)
        assert answer.usage.prompt_tokens == len(prompt)

    def _check_tie(
        self,
        prompt: Sequence[int],
        options: GenerateOptions,
        expected: Expected,
        answer: Completion,
        position: int,
    ) -> None:
        assert position < min(len(expected.token_ids), len(answer.token_ids)), "one stream ends too early"
        known = expected.token_ids[:position]
        scores = next_scores(expected.logits[position], prompt, known, options, slack=BORDER)
        ours, theirs = answer.token_ids[position], expected.token_ids[position]
        assert scores[theirs] - scores[ours] < TIE, f"position {position}: {ours} is not {theirs}"
        self.num_ties += 1
        print(f"tie at position {position}: {ours} and {theirs}")  # noqa: T201  # ties are told

    def _check_logprobs(
        self, expected: Expected, options: GenerateOptions, answer: Completion, num: int
    ) -> None:
        num_top = options.get("logprobs")
        if num_top is None:
            assert answer.logprobs == ()
            return
        assert len(answer.logprobs) == len(answer.token_ids)
        for position in range(num):
            logprobs = expected.logits[position].double().log_softmax(0)
            given = answer.logprobs[position]
            assert given.chosen.token_id == answer.token_ids[position]
            assert len({each.token_id for each in given.top}) == num_top
            for each in (given.chosen, *given.top):
                assert abs(each.logprob - float(logprobs[each.token_id])) < TIE
            best = sorted(logprobs.tolist(), reverse=True)[:num_top]
            for each, value in zip(given.top, best, strict=True):
                assert abs(each.logprob - value) < TIE

    def generate(self, prompt: Sequence[int], options: GenerateOptions) -> Expected:
        name = f"{prompt} {options}"
        if name not in self._known:
            self._known[name] = self._generate(prompt, options)
        return self._known[name]

    def _generate(self, prompt: Sequence[int], options: GenerateOptions) -> Expected:
        output: list[int] = []
        logits: list[torch.Tensor] = []
        while True:
            logits.append(self._reference.scores([*prompt, *output])[-1])
            output.append(int(next_scores(logits[-1], prompt, output, options).argmax()))
            if (ending := self._ending(output, options)) is not None:
                return Expected(output, logits, *ending)

    def _ending(
        self, output: list[int], options: GenerateOptions
    ) -> tuple[str, FinishReason, str | int | None] | None:
        keeps = options.get("include_stop_in_output", False)
        min_tokens = options.get("min_tokens", 0)
        last = output[-1]
        if len(output) > min_tokens:
            is_eos = last in EOS and not options.get("ignore_eos")
            if is_eos or last in options.get("stop_token_ids", ()):
                text = self._decode(output if keeps else output[:-1])
                return (text, FinishReason.EOS, None) if is_eos else (text, FinishReason.STOP, last)
            if (found := self._stop_string(output, options)) is not None:
                begin, stop = found
                text = self._decode(output)[:begin] + (stop if keeps else "")
                return text, FinishReason.STOP, stop
        if len(output) == options["max_tokens"]:
            return self._decode(output), FinishReason.LENGTH, None
        return None

    def _stop_string(self, output: list[int], options: GenerateOptions) -> tuple[int, str] | None:
        """Where the stop string that is whole first begins, behind the text of the first min_tokens."""
        text = self._decode(output)
        begin = len(self._decode(output[: options.get("min_tokens", 0)]).rstrip("\N{REPLACEMENT CHARACTER}"))
        for end in range(begin, len(text) + 1):
            for stop in sorted(options.get("stop", ()), key=len, reverse=True):
                if text[begin:end].endswith(stop):
                    return end - len(stop), stop
        return None

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two streams have in common from the start."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))
