"""Text in: prompts and chats to token ids, off the event loop where they are long.

Sizes are checked before anything is computed, and so many long texts may wait at once: beyond that a
request is refused, like one that finds the queue full.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pdserve.v1.errors import InvalidArgument, ResourceExhausted
from router.text.chat_template import ChatTemplate
from router.text.detokenizer import ByteLevelDetokenizer, ByteVocabulary, Detokenizer, WindowDetokenizer
from router.text.grammar_check import GrammarCheck
from router.text.model_folder import ModelFolder
from router.text.token_bytes import TokenBytes

# Characters that take about a millisecond.
SHORT_TEXT = 4096
MAX_LONG_TEXTS = 64


class TextCodec:
    """The model's tokenizer, both ways."""

    def __init__(self, folder: ModelFolder) -> None:
        self._tokenizer = folder.tokenizer
        self._chat_template = (
            ChatTemplate(folder.chat_template, folder.special_tokens) if folder.chat_template else None
        )
        decoder = json.loads(folder.tokenizer.to_str()).get("decoder") or {}
        self._bytes = ByteVocabulary(folder.tokenizer) if decoder.get("type") == "ByteLevel" else None
        self._token_bytes = TokenBytes(folder.tokenizer, self._bytes)
        self.grammars = GrammarCheck(folder)
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._num_long_texts = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def bytes_of(self, token_id: int) -> bytes:
        """One token's own; empty for an id that no token has."""
        return self._token_bytes.bytes_of(token_id)

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """For what follows the prompt, which is in token ids."""
        if self._bytes is not None:
            return ByteLevelDetokenizer(self._bytes)
        return WindowDetokenizer(self._tokenizer, prompt)

    async def encode_text(self, text: str) -> tuple[int, ...]:
        return await self._run(len(text), lambda: self._encode(text, add_special_tokens=True))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> tuple[int, ...]:
        template = self._chat_template
        if template is None:
            raise InvalidArgument("prompt.chat: this model has no chat template")

        def render_and_encode() -> tuple[int, ...]:
            text = template.render(messages, add_generation_prompt=add_generation_prompt)
            # The template has put the special tokens in.
            return self._encode(text, add_special_tokens=False)

        # Each message costs something, however short; a role may be as long as a text.
        length = sum(32 + len(each["role"]) + len(each["content"]) for each in messages)
        return await self._run(length, render_and_encode)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # The batch form lets go of the interpreter's lock while it works; "fast" computes no offsets.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    async def _run(self, length: int, work: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        if length <= SHORT_TEXT:
            return work()
        if self._num_long_texts >= MAX_LONG_TEXTS:
            raise ResourceExhausted("too many long prompts at once", reason="QUEUE_FULL", retry_after_s=1.0)
        self._num_long_texts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_long_texts -= 1
