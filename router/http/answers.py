"""One sequence's answer, collected, in the shapes of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.v1 import generation_pb2
from router.outputs import Delta, Finished, Output, Started

_REASONS = {
    generation_pb2.FINISH_REASON_EOS: "stop",
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(slots=True)
class Collected:
    """Of one index: what its outputs said so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[generation_pb2.PositionLogprobs] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None

    def add(self, output: Output) -> None:
        if isinstance(output, Delta):
            self.texts.append(output.piece.text)
            self.token_ids.extend(output.piece.token_ids)
            self.logprobs.extend(output.piece.logprobs)
        elif isinstance(output, Started):
            self.started = output
        else:
            self.finished = output


def finish_reason(finished: Finished) -> str:
    return _REASONS[finished.ending.reason]


def stop_reason(finished: Finished) -> str | int | None:
    """vLLM's: which stop string or stop token id it was."""
    return finished.ending.matched_stop or finished.ending.matched_token_id


def usage(started: Sequence[Started], num_completion_tokens: int, n: int) -> dict[str, object]:
    """Each prompt counts once, however many sequences came of it."""
    prompts = [each for each in started if each.index % n == 0]
    prompt_tokens = sum(each.prompt_tokens for each in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
    }
