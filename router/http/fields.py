"""Types of fields that are bounded while they are read: a list ends at its first wrong item, and what is too
long is refused by its length. A body costs about what it weighs, right or wrong.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from router.front.checks import (
    MAX_CHAT_MESSAGES,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIASES,
    MAX_REQUEST_ID_BYTES,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

T = TypeVar("T")

# How many prompts are taken is the router's setting; this is what is read at all.
MAX_PROMPTS = 1 << 14
MAX_CONTENT_PARTS = 4096
MAX_NAME_CHARACTERS = 1024
# As an expression each takes six characters at the least, but for an empty one.
MAX_CHOICES = MAX_GRAMMAR_BYTES // 5


def _count_first(value: object) -> object:
    """Of a mapping every wrong key would be told."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise PydanticCustomError("too_long", f"over {MAX_LOGIT_BIASES} tokens")
    return value


Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
# OpenAI's is signed, ours is not; both fit.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]

Items = Annotated[list[T], Field(fail_fast=True)]
Prompt = (
    str
    | Items[TokenId]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    | Annotated[list[Items[TokenId]], Field(fail_fast=True, max_length=MAX_PROMPTS)]
)
Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
RequestId = Annotated[str, Field(max_length=MAX_REQUEST_ID_BYTES)]
StopString = Annotated[str, Field(max_length=MAX_STOP_STRING_BYTES)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
StopTokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[dict[TokenId, float], BeforeValidator(_count_first)]
Messages = Annotated[list[T], Field(fail_fast=True, max_length=MAX_CHAT_MESSAGES)]
Parts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_CONTENT_PARTS)]
GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
Choices = Annotated[list[GrammarText], Field(fail_fast=True, max_length=MAX_CHOICES)]
