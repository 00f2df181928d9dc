"""What the two of OpenAI's APIs have in common, and the contract for where they differ."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import ClassVar

from router.http.answers import Collected, usage
from router.http.calls import Call
from router.outputs import Delta, Finished, Output, Started


class Shape(ABC):
    """Writes one call's answer down. Knows which outputs came; `whole` and `chunk` make JSON objects."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, call: Call, model: str) -> None:
        self.style = call.style
        self.words = call.words
        self._n = call.n
        self._head: dict[str, object] = {
            "id": f"{self.id_prefix}-{call.request_id}",
            "object": self.chunk_object if call.style.stream else self.whole_object,
            "created": int(time.time()),
            "model": model,
        }
        self._started: list[Started] = []
        self._num_tokens = 0

    @abstractmethod
    def choice(self, collected: Collected) -> dict[str, object]:
        """One sequence's whole answer, without its index."""

    @abstractmethod
    def opening(self, started: Started) -> dict[str, object] | None:
        """The first chunk's choice; None where the first chunk is that of the first token."""

    @abstractmethod
    def delta(self, delta: Delta) -> dict[str, object]:
        """The choice of some tokens."""

    @abstractmethod
    def closing(self, finished: Finished) -> dict[str, object]:
        """The last chunk's choice."""

    def note(self, output: Output) -> None:
        if isinstance(output, Delta):
            self._num_tokens += len(output.piece.token_ids)
        elif isinstance(output, Started):
            self._started.append(output)

    def usage(self) -> dict[str, object]:
        return usage(self._started, self._num_tokens, self._n)

    def whole(self, answers: dict[int, Collected]) -> dict[str, object]:
        choices = [{"index": index} | self.choice(answers[index]) for index in sorted(answers)]
        return self._head | {"choices": choices, "usage": self.usage()}

    def chunk(self, output: Output) -> dict[str, object] | None:
        """None where there is nothing to say yet."""
        choice = self._chunk_choice(output)
        if choice is None:
            return None
        chunk = self._head | {"choices": [{"index": output.index} | choice]}
        if self.style.include_usage:
            chunk["usage"] = self.usage() if self.style.continuous_usage else None
        return chunk

    def usage_chunk(self) -> dict[str, object]:
        return self._head | {"choices": [], "usage": self.usage()}

    def _chunk_choice(self, output: Output) -> dict[str, object] | None:
        if isinstance(output, Delta):
            return self.delta(output)
        return self.opening(output) if isinstance(output, Started) else self.closing(output)
