"""The tokens of one attempt, from two senders, put in order.

The prefill worker answers with the first token; the decode worker's stream begins by repeating it. Either
may come first, and the decode worker's next token may overtake the prefill worker's. So tokens are
ordered and de-duplicated by position, and a failure is told only after every token before it.

Where the prefill worker's report (cached tokens, prefill time) is awaited, the first token waits for it: it
belongs to the first answer to the client. P's call ends in bounded time, whatever happens to P.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from pdserve.v1.errors import Internal, PdserveError
from router.tokens import PrefillReport, Token


class Inbox:
    """Filled by the readers of both workers' streams, emptied by the request's own task."""

    def __init__(self, first_position: int) -> None:
        self._next = first_position
        self._last: Token | None = None
        self._pending: dict[int, Token] = {}
        self._failure: PdserveError | None = None
        self._awaits_report = False
        self._report: PrefillReport | None = None
        self._changed = asyncio.Event()
        # By weight: what a token's logprobs take counts as well.
        self.num_unread = 0
        self.heard_from_decode = False
        # By its own word the decode worker has nothing of the sequence any more.
        self.decode_let_go = False
        self.is_failed_by_prefill = False

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def await_report(self) -> None:
        self._awaits_report = True

    def put_prefill(self, token: Token) -> None:
        self._report = token.report
        self._awaits_report = False
        self._put(token)

    def put_decode(self, token: Token) -> None:
        self.heard_from_decode = True
        self.decode_let_go = self.decode_let_go or token.finish_reason is not None
        self._put(token)

    def prefill_ended(self) -> None:
        self._awaits_report = False
        self._changed.set()

    def fail_prefill(self, error: PdserveError) -> None:
        """No failure of the attempt once the decode worker has the sequence."""
        if not self.heard_from_decode:
            self.is_failed_by_prefill = self._failure is None
            self._fail(error)
        self.prefill_ended()

    def fail_decode(self, error: PdserveError, *, let_go: bool = False) -> None:
        self.decode_let_go = self.decode_let_go or let_go
        self._fail(error)

    def drop(self, error: PdserveError) -> None:
        """What waits here is for nobody any more: whoever asks for it gets `error`."""
        self._pending.clear()
        self.num_unread = 0
        self._failure = error
        self._changed.set()

    async def take(self) -> list[Token]:
        """The next tokens in order, at least one. Raises what ended the attempt once they are out."""
        while True:
            self._changed.clear()
            if tokens := self._ready():
                return tokens
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    def _ready(self) -> list[Token]:
        tokens: list[Token] = []
        if self._awaits_report and self._failure is None:
            return tokens
        while (token := self._pending.pop(self._next, None)) is not None:
            self.num_unread -= _weight(token)
            if self._report is not None:
                token, self._report = replace(token, report=self._report), None
            tokens.append(token)
            self._last = token
            self._next += 1
        return tokens

    def _put(self, token: Token) -> None:
        twin = self._pending.get(token.position)
        if twin is None and self._last is not None and token.position == self._last.position:
            twin = self._last
        if twin is not None and twin.token_id != token.token_id:
            self._fail(Internal(f"two workers disagree about the token at position {token.position}"))
        elif twin is None and token.position >= self._next:
            self._pending[token.position] = token
            self.num_unread += _weight(token)
        self._changed.set()

    def _fail(self, error: PdserveError) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.set()


def _weight(token: Token) -> int:
    return 1 if token.logprobs is None else 2 + len(token.logprobs.top)
