"""What an engine has computed since its start."""

from __future__ import annotations

from collections.abc import Sequence

from engine.chunk import Chunk
from engine.request import NewToken


class Tally:
    def __init__(self) -> None:
        self.tokens_prefilled = 0
        self.tokens_decoded = 0
        self.draft_tokens = 0
        self.accepted_draft_tokens = 0

    def note(self, chunk: Chunk, tokens: Sequence[NewToken], is_first: bool) -> None:
        """`is_first`: the chunk was of a prompt, and `tokens` are the first drawn, if there are any."""
        if is_first:
            self.tokens_prefilled += chunk.num_tokens
        else:
            self.tokens_decoded += len(tokens)
        if chunk.drafts:
            self.draft_tokens += len(chunk.drafts)
            self.accepted_draft_tokens += sum(token.was_drafted for token in tokens)
