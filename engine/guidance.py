"""Grammars by llguidance (github.com/guidance-ai/llguidance): an Earley parser over lexemes whose automata
grow as they are used. A mask usually takes 10 to 100 µs.

Copies of a matcher share those automata, and with them their limit: a matcher that runs into it starts
again with its own, so no sequence breaks for what others did.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from engine.deep_stack import deep_stack
from engine.errors import GrammarError, first_line
from engine.grammar import Grammar, Mask

# CPU time, so a loaded machine refuses nothing that an idle one takes. Most grammars compile in 1 to 20 ms.
MAX_COMPILE_S = 1.0
# A sequence's masks may take so long before it is stopped: it would hold up those that share its steps.
MAX_MEAN_MASK_S, FREE_MASK_S = 0.005, 0.5
# About 2 kB each.
_MAX_LEXER_STATES = 50_000
_NUM_CACHED = 16
# Characters of what the library says.
_MAX_COMPLAINT = 300


class Grammars:
    """Compiles for one model, on a thread of its own, and keeps those used last."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._cached: OrderedDict[str, GuidanceMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def prepare(self, text: str, known_token_ids: tuple[int, ...] = ()) -> Future[Grammar]:
        """`text`: in llguidance's own form. The future raises GrammarError for what cannot be compiled, takes
        too long, or does not allow the known output.
        """
        with deep_stack():  # the first call starts the thread
            return self._thread.submit(self._prepare, text, known_token_ids)

    def _prepare(self, text: str, known_token_ids: tuple[int, ...]) -> Grammar:
        matcher = self._first(text).copy()
        for token_id in known_token_ids:
            matcher.append(token_id)
        if matcher.error is not None:
            raise GrammarError(f"the known output is not the grammar's: {matcher.error}")
        return GuidanceGrammar(matcher)

    def _first(self, text: str) -> GuidanceMatcher:
        with self._lock:
            matcher = self._cached.get(text)
            if matcher is not None:
                self._cached.move_to_end(text)
                return matcher
        matcher = self._compile(text)
        with self._lock:
            self._cached[text] = matcher
            if len(self._cached) > _NUM_CACHED:
                self._cached.popitem(last=False)
        return matcher

    def _compile(self, text: str) -> GuidanceMatcher:
        self._load_tokenizer()
        began_s = time.thread_time()
        matcher = GuidanceMatcher(self, text, self.matcher(text), [], is_shared=False)
        if matcher.error is None:
            matcher.masks()  # the first takes longest
        if matcher.error is not None:
            raise GrammarError(f"the grammar cannot be used: {matcher.error}")
        if time.thread_time() - began_s > MAX_COMPILE_S:
            raise GrammarError("the grammar takes too long to compile")
        return matcher

    def matcher(self, text: str) -> LLMatcher:
        """Compiled anew; it never raises, but says that it is in error. On a thread with a deep stack."""
        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        return LLMatcher(self._load_tokenizer(), text, limits=limits, log_level=0)

    def forget(self, text: str) -> None:
        """Who asks next gets automata that are small again."""
        with self._lock:
            self._cached.pop(text, None)

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            if not self.eos_token_ids:
                raise GrammarError("the model names no EOS token, which ends what a grammar allows")
            tokenizer = Tokenizer.from_file(str(self._file))
            size = max(self._vocab_size, tokenizer.get_vocab_size())
            try:
                self._tokenizer = LLTokenizer(
                    tokenizer.to_str(), n_vocab=size, eos_token=sorted(self.eos_token_ids)
                )
            except ValueError as error:
                raise GrammarError(f"no grammar for this model's tokenizer: {first_line(error)}") from error
        return self._tokenizer


class GuidanceGrammar:
    def __init__(self, matcher: GuidanceMatcher) -> None:
        self._matcher = matcher

    def begin(self) -> GuidanceMatcher:
        return self._matcher.copy()


class GuidanceMatcher:
    def __init__(
        self, grammars: Grammars, text: str, matcher: LLMatcher, token_ids: list[int], *, is_shared: bool
    ) -> None:
        """`matcher` has `token_ids` behind it; `is_shared` where others have its automata."""
        self._grammars = grammars
        self._text = text
        self._matcher = matcher
        self._token_ids = token_ids
        self._is_shared = is_shared
        self._spent_s = 0.0
        self._num_masks = 0
        self._error: str | None = None
        self._settle()

    def copy(self) -> GuidanceMatcher:
        matcher, token_ids = self._matcher.deep_copy(), self._token_ids.copy()
        return GuidanceMatcher(self._grammars, self._text, matcher, token_ids, is_shared=True)

    @property
    def error(self) -> str | None:
        return self._error

    def append(self, token_id: int) -> None:
        if token_id in self._grammars.eos_token_ids or self._error is not None:
            return
        began_s = time.thread_time()
        self._token_ids.append(token_id)
        if not self._matcher.consume_token(token_id):
            self._settle()
        self._spent_s += time.thread_time() - began_s

    def masks(self, drafts: Sequence[int] = ()) -> list[Mask]:
        began_s = time.thread_time()
        masks = [self._mask()]
        if drafts:
            ahead = self._matcher.deep_copy()
            for token_id in drafts:
                ahead.consume_token(token_id)
                masks.append(_bits(ahead))
        self._spent_s += time.thread_time() - began_s
        self._num_masks += len(masks)
        if self._spent_s > FREE_MASK_S + self._num_masks * MAX_MEAN_MASK_S and self._error is None:
            self._error = "the grammar takes too long for each token"
        return masks

    def num_possible(self, token_ids: Sequence[int]) -> int:
        ends = (i for i, token_id in enumerate(token_ids) if token_id in self._grammars.eos_token_ids)
        return self._matcher.validate_tokens(list(token_ids[: next(ends, None)]))

    def _mask(self) -> Mask:
        mask = _bits(self._matcher)
        if self._matcher.is_error() and self._error is None:
            self._settle()
            mask = _bits(self._matcher)
        return np.zeros_like(mask) if self._error is not None else mask

    def _settle(self) -> None:
        """If it broke: with automata of its own it may not."""
        if self._matcher.is_error() and self._is_shared:
            self._grammars.forget(self._text)
            self._is_shared = False
            self._matcher = self._grammars.matcher(self._text)
            self._matcher.consume_tokens(self._token_ids)
        if self._matcher.is_error():
            self._error = " ".join(self._matcher.get_error().split())[:_MAX_COMPLAINT]


def _bits(matcher: LLMatcher) -> Mask:
    """Nothing where it is in error."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.zeros_like(mask) if matcher.is_error() else mask
