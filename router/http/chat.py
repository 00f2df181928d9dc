"""The shape of /v1/chat/completions."""

from __future__ import annotations

from router.http.answers import Collected, finish_reason, stop_reason
from router.http.calls import Call
from router.http.logprobs import chat_logprobs
from router.http.shape import Shape
from router.outputs import Delta, Finished, Output, Started
from router.text.tokenizer import TextCodec


class ChatShape(Shape):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, call: Call, model: str, codec: TextCodec) -> None:
        super().__init__(call, model)
        self._codec = codec

    def whole(self, answers: dict[int, Collected]) -> dict[str, object]:
        whole = super().whole(answers)
        if self.style.token_ids:
            whole["prompt_token_ids"] = self._started[0].prompt_token_ids
        return whole

    def choice(self, collected: Collected) -> dict[str, object]:
        choice: dict[str, object] = {
            "message": {"role": "assistant", "content": "".join(collected.texts), "refusal": None},
            "logprobs": None,
        }
        if self.style.logprobs is not None:
            choice["logprobs"] = chat_logprobs(self._codec, self.style, collected.logprobs)
        if collected.finished is not None:
            reasons = {
                "finish_reason": finish_reason(collected.finished),
                "stop_reason": stop_reason(collected.finished),
            }
            choice |= reasons
        if self.style.token_ids:
            choice["token_ids"] = collected.token_ids
        return choice

    def chunk(self, output: Output) -> dict[str, object] | None:
        chunk = super().chunk(output)
        if chunk is not None and isinstance(output, Started) and self.style.token_ids:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        return chunk

    def opening(self, started: Started) -> dict[str, object]:
        delta = {"role": "assistant", "content": ""}
        return {"delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, delta: Delta) -> dict[str, object]:
        piece = delta.piece
        choice: dict[str, object] = {
            "delta": {"content": piece.text},
            "logprobs": None,
            "finish_reason": None,
        }
        if self.style.logprobs is not None:
            choice["logprobs"] = chat_logprobs(self._codec, self.style, piece.logprobs)
        if self.style.token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def closing(self, finished: Finished) -> dict[str, object]:
        reasons = {"finish_reason": finish_reason(finished), "stop_reason": stop_reason(finished)}
        empty: dict[str, object] = {"delta": {}, "logprobs": None}
        return empty | reasons
