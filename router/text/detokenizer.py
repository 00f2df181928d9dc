"""Token ids to text, token by token. Never half a character; the pieces join to the decoding of all ids.

Only output tokens come out: a prompt that ends inside a character leaves nothing of itself in the output. But
that there is a prompt matters to decoders that take the space from a text's first word.
`WindowDetokenizer` works with every decoder; `ByteLevelDetokenizer` does the same for byte-level
vocabularies without decoding anything twice (a test compares them).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character's bytes, one token each.
_MAX_BEFORE = 4


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """What is left at the end: incomplete bytes, as U+FFFD."""
        ...


class WindowDetokenizer:
    """Decodes a short window again with each token: the text is what the window grew by.

    The window begins one emitted piece back, since decoders treat a beginning in their own way (they
    strip a space). Source: the prefix and read offsets of text-generation-inference.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_MAX_BEFORE:])
        self._begin = self._beginning()  # of the window
        self._read = len(self._ids)  # ids before this one have gone out as text, or are the prompt's

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        old, new = self._decode(self._begin, self._read), self._decode(self._begin, len(self._ids))
        if len(new) <= len(old) or new.endswith(REPLACEMENT):
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return new[len(old) :]

    def flush(self) -> str:
        old, new = self._decode(self._begin, self._read), self._decode(self._begin, len(self._ids))
        self._begin = self._read = len(self._ids)
        return new[len(old) :]

    def _beginning(self) -> int:
        """Where the fewest last ids of a prompt begin that are text, and whole; else behind them."""
        for begin in reversed(range(len(self._ids))):
            text = self._decode(begin, len(self._ids))
            if text and REPLACEMENT not in text:
                return begin
        return len(self._ids)

    def _decode(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[begin:end], skip_special_tokens=True) if end > begin else ""


class ByteVocabulary:
    """The bytes behind each id of a byte-level vocabulary; none for special tokens and unknown ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""
        table = byte_of_character()
        # An added token may hold characters that stand for no byte: it is plain text then.
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return token.encode()


class ByteLevelDetokenizer:
    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@lru_cache(maxsize=1)
def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    table.update({chr(0x100 + number): byte for number, byte in enumerate(sorted(set(others)))})
    return table
