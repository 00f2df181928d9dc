"""Structured output: OpenAI's `response_format` and vLLM's ways of asking, as one constraint of ours."""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import BaseModel, ConfigDict, Field

from pdserve.v1 import generation_pb2
from pdserve.v1.errors import InvalidArgument, Unimplemented
from router.front.checks import MAX_GRAMMAR_BYTES
from router.http.fields import Choices, GrammarText

Schema = dict[str, object] | GrammarText
# Translated on the event loop, in up to 30 ms.
MAX_GBNF_CHARACTERS = 1 << 13


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    # OpenAI's key; pydantic keeps `schema` for itself.
    schema_: Annotated[dict[str, object] | None, Field(alias="schema")] = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's newer form."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: object = None


class StructuredFields(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's older form.
    guided_json: Schema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None


def structured_output(asked: StructuredFields) -> generation_pb2.StructuredOutput | None:
    """None where the answer is free. Raises InvalidArgument, also where it is constrained in two ways, or
    Unimplemented.
    """
    newer = asked.structured_outputs or StructuredOutputs()
    of_format = asked.response_format
    if newer.structural_tag is not None or (of_format is not None and of_format.type == "structural_tag"):
        raise Unimplemented("response_format: structural tags are not supported here")
    found = [
        *_of_format(of_format),
        *_json("guided_json", asked.guided_json),
        *_json("structured_outputs", newer.json_),
        *_json("structured_outputs", {"type": "object"} if newer.json_object else None),
        *_regex(asked.guided_regex),
        *_regex(newer.regex),
        *_regex(_one_of("guided_choice", asked.guided_choice)),
        *_regex(_one_of("structured_outputs", newer.choice)),
        *_grammar(asked.guided_grammar),
        *_grammar(newer.grammar),
    ]
    if len(found) > 1:
        raise InvalidArgument("response_format: the answer is constrained in more than one way")
    return found[0] if found else None


def _of_format(asked: ResponseFormat | None) -> list[generation_pb2.StructuredOutput]:
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return _json("response_format", {"type": "object"})
    schema = asked.json_schema.schema_ if asked.json_schema is not None else None
    if schema is None:
        raise InvalidArgument("response_format: json_schema has no schema")
    return _json("response_format", schema)


def _json(field: str, schema: Schema | None) -> list[generation_pb2.StructuredOutput]:
    if schema is None:
        return []
    text = schema if isinstance(schema, str) else _dumped(field, schema)
    if not text:
        raise InvalidArgument(f"{field}: the schema is empty")
    return [generation_pb2.StructuredOutput(json_schema=text)]


def _dumped(field: str, schema: dict[str, object]) -> str:
    """Written in pieces, and given up as soon as it is too large."""
    pieces: list[str] = []
    num_characters = 0
    try:
        for piece in json.JSONEncoder().iterencode(schema):
            num_characters += len(piece)
            if num_characters > MAX_GRAMMAR_BYTES:
                raise _too_large(field)
            pieces.append(piece)
    except RecursionError as error:
        raise InvalidArgument(f"{field}: is nested too deep") from error
    return "".join(pieces)


def _too_large(field: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: at most {MAX_GRAMMAR_BYTES} bytes are taken")


def _regex(regex: str | None) -> list[generation_pb2.StructuredOutput]:
    return [] if regex is None else [generation_pb2.StructuredOutput(regex=regex)]


def _grammar(grammar: str | None) -> list[generation_pb2.StructuredOutput]:
    if grammar is None:
        return []
    return [generation_pb2.StructuredOutput(grammar=grammar if _is_lark(grammar) else _from_gbnf(grammar))]


def _is_lark(grammar: str) -> bool:
    starts = ("start:", "start ", "%llguidance")
    return "::=" not in grammar or any(line.lstrip().startswith(starts) for line in grammar.splitlines())


def _from_gbnf(grammar: str) -> str:
    """llama.cpp's form, which vLLM takes too; our own API has Lark's alone."""
    if len(grammar) > MAX_GBNF_CHARACTERS:
        raise InvalidArgument(f"guided_grammar: in GBNF at most {MAX_GBNF_CHARACTERS} characters are taken")
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library raises nothing narrower, and runs out of stack
        raise InvalidArgument(f"guided_grammar: is no GBNF: {error}") from error


def _one_of(field: str, choices: list[str] | None) -> str | None:
    if choices is None:
        return None
    if not choices:
        raise InvalidArgument(f"{field}: there is nothing to choose from")
    if sum(map(len, choices)) + len(choices) * len("(?:)|") - 1 > MAX_GRAMMAR_BYTES:
        raise _too_large(field)
    return "|".join(f"(?:{re.escape(choice)})" for choice in choices)
