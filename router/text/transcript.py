"""What a sequence has said so far: ids, text, and whether it is over. Survives the loss of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.v1 import generation_pb2
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import Match, StopStrings
from router.tokens import Token

EOS = generation_pb2.FINISH_REASON_EOS
STOP = generation_pb2.FINISH_REASON_STOP


@dataclass(frozen=True, slots=True)
class StopText:
    """The router's share of the stop conditions: what needs text."""

    strings: tuple[str, ...] = ()
    # The text of so many first tokens is not searched.
    min_tokens: int = 0
    keep_in_text: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    reason: generation_pb2.FinishReason
    matched_stop: str | None = None
    matched_token_id: int | None = None
    # Whether the worker ended it by itself: it holds nothing of the sequence any more.
    by_worker: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens add to the answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[generation_pb2.PositionLogprobs, ...]


class Transcript:
    """Takes tokens in order; takes none behind the one that ended the sequence."""

    def __init__(self, detokenizer: Detokenizer, stop: StopText) -> None:
        self.token_ids: list[int] = []
        self.ending: Ending | None = None
        self.num_drafts = 0
        self.num_accepted_drafts = 0
        self._detokenizer = detokenizer
        self._stop = stop
        self._matcher = StopStrings(stop.strings)

    def push(self, tokens: Sequence[Token]) -> Piece:
        texts: list[str] = []
        taken: list[Token] = []
        for token in tokens:
            if self.ending is not None:
                break
            self.token_ids.append(token.token_id)
            self.num_drafts += token.num_drafts
            self.num_accepted_drafts += token.was_drafted
            taken.append(token)
            texts.append(self._push(token))
        logprobs = tuple(token.logprobs for token in taken if token.logprobs is not None)
        return Piece("".join(texts), tuple(token.token_id for token in taken), logprobs)

    def _push(self, token: Token) -> str:
        if token.finish_reason in (EOS, STOP) and not self._stop.keep_in_text:
            # A stop id's own text is no part of the answer.
            piece = ""
        else:
            piece = self._detokenizer.push(token.token_id)
        if token.finish_reason is not None:
            piece += self._detokenizer.flush()
        text = self._search(piece)
        if self.ending is None and token.finish_reason is not None:
            text += self._matcher.flush()
            matched = token.token_id if token.finish_reason == STOP else None
            self.ending = Ending(token.finish_reason, matched_token_id=matched)
        return text

    def _search(self, piece: str) -> str:
        if len(self.token_ids) <= self._stop.min_tokens:
            return piece
        found = self._matcher.push(piece)
        if not isinstance(found, Match):
            return found
        self.ending = Ending(STOP, matched_stop=found.stop, by_worker=False)
        return found.text + (found.stop if self._stop.keep_in_text else "")
