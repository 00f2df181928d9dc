"""Errors in the names that the client used. Our own API calls some fields otherwise, and has them in
sections: who sent `max_completion_tokens` has never heard of `stop.max_tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pdserve.v1.errors import InvalidArgument, PdserveError, Unimplemented

_NAMED = re.compile(r"(?:(?:prompt|sampling|stop|output)\.)?([a-z_]+): ")
_LIMIT = re.compile(r"\bmax_tokens\b")


@dataclass(frozen=True, slots=True)
class Words:
    """The client's names of what our own API calls prompt, max_tokens, logprobs and structured."""

    prompt: str
    max_tokens: str
    logprobs: str
    structured: str

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """What is raised within names the client's fields."""
        try:
            yield
        except (InvalidArgument, Unimplemented) as error:
            raise self.of(error) from error

    def of(self, error: PdserveError) -> PdserveError:
        return type(error)(self._said(error.message), reason=error.reason, retry_after_s=error.retry_after_s)

    def _said(self, message: str) -> str:
        named = _NAMED.match(message)
        if named is None:
            return message
        ours = named.group(1)
        theirs = {
            "prompt": self.prompt,
            "text": self.prompt,
            "token_ids": self.prompt,
            "chat": self.prompt,
            "logprobs": self.logprobs,
            "structured": self.structured,
        }.get(ours, ours)
        return _LIMIT.sub(self.max_tokens, f"{theirs}: {message[named.end() :]}")
