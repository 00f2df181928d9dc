"""What speculative decoding is worth: one answer at a time, with it and without, by turns in one process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from engine.config import EngineConfig, SpeculativeConfig
from engine.engine import Engine
from engine.loading import LoadedModel
from engine.request import EngineLoad, SequenceOutput, SequenceRequest
from engine.sampling import SamplingParams, StopConditions
from pdserve.bench.errors import BenchError
from pdserve.bench.passages import PASSAGES, Passage
from pdserve.bench.subject import Timed
from router.text.chat_template import ChatTemplate
from router.text.model_folder import read_model_folder

MAX_TOKENS = 256
# So many tokens of prompt and answer fit.
_MAX_LEN = 2048


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """Of one passage, medians over the rounds. Rates are of decoding alone, without the first token."""

    name: str
    num_tokens: int
    plain_tok_s: float
    speculative_tok_s: float
    ratio: float  # of the rates of one round
    num_drafts: int
    num_accepted_drafts: int


def measure_speculation(
    model: LoadedModel, speculative: SpeculativeConfig, num_rounds: int, say: Callable[[str], None]
) -> list[SpeculationResult]:
    """Both engines share the model. Raises BenchError."""
    settings = EngineConfig(num_blocks=_MAX_LEN // 16, enable_prefix_caching=False)
    plain = Engine(model, settings)
    speculating = Engine(model, settings.model_copy(update={"speculative": speculative}))
    results: list[SpeculationResult] = []
    for passage in PASSAGES:
        say(passage.name)
        request = _request(passage, chat_ids(model.folder, passage.request))
        results.append(_measure(passage.name, request, plain, speculating, num_rounds))
    return results


def chat_ids(folder: Path, text: str) -> list[int]:
    """As the router makes them; without a chat template the bare text's."""
    read = read_model_folder(folder)
    if read.chat_template is None:
        return list(read.tokenizer.encode(text).ids)
    template = ChatTemplate(read.chat_template, read.special_tokens)
    chat = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    return list(read.tokenizer.encode(chat, add_special_tokens=False).ids)


def _measure(
    name: str, request: SequenceRequest, plain: Engine, speculating: Engine, num_rounds: int
) -> SpeculationResult:
    timed: list[tuple[Timed, Timed]] = []
    for _ in range(1 + num_rounds):
        before = speculating.snapshot()
        timed.append((_decode(plain, request), _decode(speculating, request)))
    drafts, accepted = _drafts_between(before, speculating.snapshot())
    timed = timed[1:]  # the first round warms up
    return SpeculationResult(
        name=name,
        num_tokens=timed[0][1].num_tokens + 1,
        plain_tok_s=median(one.tok_s for one, _ in timed),
        speculative_tok_s=median(other.tok_s for _, other in timed),
        ratio=median(other.tok_s / one.tok_s for one, other in timed),
        num_drafts=drafts,
        num_accepted_drafts=accepted,
    )


def _drafts_between(before: EngineLoad, after: EngineLoad) -> tuple[int, int]:
    drafts = after.draft_tokens - before.draft_tokens
    return drafts, after.accepted_draft_tokens - before.accepted_draft_tokens


_numbers = itertools.count()


def _request(passage: Passage, prompt: Sequence[int]) -> SequenceRequest:
    return SequenceRequest(
        sequence_id=f"speculation-{next(_numbers)}",
        prompt_token_ids=tuple(prompt),
        known_token_ids=(),
        sampling=SamplingParams(temperature=passage.temperature, seed=7),
        stop=StopConditions(MAX_TOKENS),
    )


def _decode(engine: Engine, request: SequenceRequest) -> Timed:
    """Tokens behind the first one, and their time."""
    engine.add(request)
    outputs: list[SequenceOutput] = []
    while not any(output.new_tokens for output in outputs):
        outputs = _step(engine)
    num_tokens, began = 0, time.perf_counter()
    while engine.has_work:
        num_tokens += sum(len(output.new_tokens) for output in _step(engine))
    if num_tokens == 0:
        raise BenchError("the model's answer was a single token: there is nothing to measure")
    return Timed(num_tokens, time.perf_counter() - began)


def _step(engine: Engine) -> list[SequenceOutput]:
    outputs = list(engine.step().outputs)
    for output in outputs:
        if output.error is not None:
            raise BenchError(output.error)
    return outputs
