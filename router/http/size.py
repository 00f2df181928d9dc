"""How much a JSON body is before anything reads it: a parsed value takes up to a hundred times its text."""

from __future__ import annotations

import asyncio
import re

from pdserve.v1.errors import InvalidArgument

# Items of lists and of objects: more than a body of ordinary token ids has.
MAX_VALUES = 1 << 21
# Lists and objects: many prompts, many messages of many parts, and a schema.
MAX_NESTED = 1 << 17
_PAUSE_EVERY = 20_000
_MARK = re.compile(rb'\\.|["\[{,]', re.DOTALL)


async def check_size(raw: bytes) -> None:
    """Raises InvalidArgument. Commas and brackets in texts do not count; only where there are very many
    they are told apart, and the event loop goes on meanwhile."""
    if _fits(raw.count(b"[") + raw.count(b"{"), raw.count(b",")):
        return
    nested = values = 0
    is_text = False
    for number, mark in enumerate(_MARK.finditer(raw)):
        byte = raw[mark.start()]
        if byte == ord('"'):
            is_text = not is_text
        elif not is_text:
            nested += byte in b"[{"
            values += byte == ord(",")
        if number % _PAUSE_EVERY == 0:
            if not _fits(nested, values):
                break
            await asyncio.sleep(0)
    if not _fits(nested, values):
        raise InvalidArgument(
            f"the body has too many parts: at most {MAX_VALUES} values, {MAX_NESTED} lists and objects",
            reason="BODY_TOO_LARGE",
        )


def _fits(nested: int, values: int) -> bool:
    return nested <= MAX_NESTED and values <= MAX_VALUES
