"""Can this output be asked for at all? Compiled here once, so that no worker meets what cannot be."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument, PdserveError, ResourceExhausted, Unimplemented
from pdserve.v1.structured import grammar_text
from router.text.deep_stack import deep_stack
from router.text.model_folder import ModelFolder

# CPU time; most take 1 to 20 ms.
MAX_COMPILE_S = 1.0
MAX_WAITING = 64
_NUM_REMEMBERED = 1024
# Characters of what the library says.
_MAX_COMPLAINT = 300


class GrammarCheck:
    """On a thread of its own, one grammar after the other. Those that passed are remembered."""

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._num_waiting = 0
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def check(self, structured: generation_pb2.StructuredOutput) -> None:
        """Raises InvalidArgument with what is wrong, or Unimplemented if this model knows no grammars."""
        text = grammar_text(structured)
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if key in self._passed:
            self._passed.move_to_end(key)
            return
        if self._num_waiting >= MAX_WAITING:
            raise ResourceExhausted("too many new grammars at once", reason="QUEUE_FULL", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            with deep_stack():  # the first call starts the thread
                asked = asyncio.get_running_loop().run_in_executor(self._thread, self._error_of, text)
            error = await asked
        finally:
            self._num_waiting -= 1
        if error is not None:
            raise error
        self._passed[key] = None
        if len(self._passed) > _NUM_REMEMBERED:
            self._passed.popitem(last=False)

    def _error_of(self, text: str) -> PdserveError | None:
        """On the thread."""
        try:
            tokenizer = self._load_tokenizer()
        except ValueError as error:
            return Unimplemented(f"sampling.structured: not with this model: {_shortened(str(error))}")
        began_s = time.thread_time()
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, text, limits=limits, log_level=0)
        if matcher.is_error():
            return InvalidArgument(f"sampling.structured: {_shortened(matcher.get_error())}")
        if time.thread_time() - began_s > MAX_COMPILE_S:
            return InvalidArgument("sampling.structured: takes too long to compile")
        return None

    def _load_tokenizer(self) -> LLTokenizer:
        """Takes a second for a large vocabulary."""
        if self._tokenizer is None:
            tokenizer, ends = self._folder.tokenizer, self._folder.eos_token_ids
            if not ends:
                raise ValueError("it names no EOS token")
            size = max(self._folder.vocab_size, tokenizer.get_vocab_size())
            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(ends))
        return self._tokenizer


def _shortened(complaint: str) -> str:
    return " ".join(complaint.split())[:_MAX_COMPLAINT]
