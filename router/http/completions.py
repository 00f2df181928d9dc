"""The shape of /v1/completions."""

from __future__ import annotations

from router.http.answers import Collected, finish_reason, stop_reason
from router.http.calls import Call
from router.http.logprobs import CompletionLogprobs
from router.http.shape import Shape
from router.outputs import Delta, Finished, Started
from router.text.tokenizer import TextCodec


class CompletionShape(Shape):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, call: Call, model: str, codec: TextCodec) -> None:
        super().__init__(call, model)
        self._codec = codec
        # By index: each counts its own place in the text.
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}

    def choice(self, collected: Collected) -> dict[str, object]:
        started, finished = collected.started, collected.finished
        choice: dict[str, object] = {"text": "".join(collected.texts), "logprobs": None}
        if started is not None and self.style.logprobs is not None:
            choice["logprobs"] = self._logprobs_of(started.index).of(collected.logprobs)
        if finished is not None:
            choice |= {"finish_reason": finish_reason(finished), "stop_reason": stop_reason(finished)}
        if started is not None and self.style.token_ids:
            choice |= {"prompt_token_ids": started.prompt_token_ids, "token_ids": collected.token_ids}
        return choice

    def opening(self, started: Started) -> None:
        if self.style.token_ids:
            self._prompts[started.index] = started.prompt_token_ids

    def delta(self, delta: Delta) -> dict[str, object]:
        piece = delta.piece
        choice: dict[str, object] = {"text": piece.text, "logprobs": None, "finish_reason": None}
        if self.style.logprobs is not None:
            choice["logprobs"] = self._logprobs_of(delta.index).of(piece.logprobs)
        if self.style.token_ids:
            choice |= {"prompt_token_ids": self._prompts.pop(delta.index, None), "token_ids": piece.token_ids}
        return choice

    def closing(self, finished: Finished) -> dict[str, object]:
        reasons = {"finish_reason": finish_reason(finished), "stop_reason": stop_reason(finished)}
        empty: dict[str, object] = {"text": "", "logprobs": None}
        return empty | reasons

    def _logprobs_of(self, index: int) -> CompletionLogprobs:
        made = self._logprobs.get(index)
        if made is None:
            made = self._logprobs[index] = CompletionLogprobs(self._codec, self.style)
        return made
