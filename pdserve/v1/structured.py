"""What a StructuredOutput asks for, as llguidance writes it down: router and workers mean the same."""

from __future__ import annotations

import json

from llguidance import LLMatcher

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument

# One run of it: a model that is at a loss would go on with it for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"


def grammar_text(structured: generation_pb2.StructuredOutput) -> str:
    """Checks no more than that a schema is JSON. Raises InvalidArgument."""
    which = structured.WhichOneof("constraint")
    if which == "json_schema":
        return _of_schema(structured.json_schema)
    if which == "regex":
        return LLMatcher.grammar_from_regex(structured.regex)
    if which == "grammar":
        return LLMatcher.grammar_from_lark(structured.grammar)
    raise InvalidArgument("sampling.structured: names no constraint")


def _of_schema(schema: str) -> str:
    """A schema that says itself how its text is laid out, by llguidance's "x-guidance", has its way."""
    try:
        value = json.loads(schema)
        if not isinstance(value, dict) or "x-guidance" in value:
            return LLMatcher.grammar_from_json_schema(schema)
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"sampling.structured: the schema is not JSON: {error}") from error
