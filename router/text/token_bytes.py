"""One token's own bytes, as log-probabilities name it. Unlike in an answer, special tokens have some."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

from router.text.detokenizer import ByteVocabulary

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# SentencePiece's space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenBytes:
    def __init__(self, tokenizer: Tokenizer, byte_level: ByteVocabulary | None) -> None:
        self._tokenizer = tokenizer
        self._byte_level = byte_level
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for an id that no token has."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level is not None:
            return self._byte_level.bytes_of(token_id) or token.encode(errors="replace")
        if (byte := _BYTE.fullmatch(token)) is not None:
            return bytes([int(byte.group(1), 16)])
        return token.replace(_SPACE, " ").encode(errors="replace")
