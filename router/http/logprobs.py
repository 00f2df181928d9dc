"""Log-probabilities in the two shapes that OpenAI's APIs have for them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pdserve.v1 import generation_pb2
from router.http.calls import Style
from router.text.tokenizer import TextCodec

# JSON has no infinity; a banned token has this instead, as with others.
_LOWEST = -9999.0


def chat_logprobs(
    codec: TextCodec, style: Style, positions: Sequence[generation_pb2.PositionLogprobs]
) -> dict[str, object]:
    content = []
    for position in positions:
        top = [_chat_token(codec, style, each) for each in position.top]
        content.append(_chat_token(codec, style, position.chosen) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(codec: TextCodec, style: Style, token: generation_pb2.TokenLogprob) -> dict[str, object]:
    raw = codec.bytes_of(token.token_id)
    return {
        "token": _name(codec, style, token.token_id),
        "logprob": max(token.logprob, _LOWEST),
        "bytes": list(raw),
    }


class CompletionLogprobs:
    """Of one sequence, piece by piece: offsets go on from piece to piece."""

    def __init__(self, codec: TextCodec, style: Style) -> None:
        self._codec = codec
        self._style = style
        self._offset = 0
        # A character counts where it is whole.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def of(self, positions: Sequence[generation_pb2.PositionLogprobs]) -> dict[str, object]:
        """`top_logprobs` holds the chosen token too, whether or not it is among the likeliest."""
        offsets: list[int] = []
        for position in positions:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._codec.bytes_of(position.chosen.token_id)))
        return {
            "tokens": [self._name(each.chosen) for each in positions],
            "token_logprobs": [max(each.chosen.logprob, _LOWEST) for each in positions],
            "top_logprobs": [self._top(each) for each in positions],
            "text_offset": offsets,
        }

    def _top(self, position: generation_pb2.PositionLogprobs) -> dict[str, float]:
        tokens = (*position.top, position.chosen)
        return {self._name(token): max(token.logprob, _LOWEST) for token in tokens}

    def _name(self, token: generation_pb2.TokenLogprob) -> str:
        return _name(self._codec, self._style, token.token_id)


def _name(codec: TextCodec, style: Style, token_id: int) -> str:
    """A token that is part of a character has no text: as with OpenAI its bytes name it."""
    if style.tokens_as_ids:
        return f"token_id:{token_id}"
    raw = codec.bytes_of(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
