"""Structured output: OpenAI's `response_format` and vLLM's ways of asking, as one constraint of ours."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

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


@dataclass(frozen=True, slots=True)
class Constraint:
    field: str  # by which the client asked for it
    message: generation_pb2.StructuredOutput


def structured_output(asked: StructuredFields) -> Constraint | None:
    """None where the answer is free. Raises InvalidArgument, also where it is constrained in two ways, or
    Unimplemented.
    """
    newer = asked.structured_outputs or StructuredOutputs()
    of_format = asked.response_format
    if of_format is not None and of_format.type == "structural_tag":
        raise Unimplemented("response_format: structural tags are not supported here")
    if newer.structural_tag is not None:
        raise Unimplemented("structured_outputs: structural tags are not supported here")
    found = [
        *_of_format(of_format),
        *_json("guided_json", asked.guided_json),
        *_json("structured_outputs", newer.json_),
        *_json("structured_outputs", {"type": "object"} if newer.json_object else None),
        *_regex("guided_regex", asked.guided_regex),
        *_regex("structured_outputs", newer.regex),
        *_regex("guided_choice", _one_of("guided_choice", asked.guided_choice)),
        *_regex("structured_outputs", _one_of("structured_outputs", newer.choice)),
        *_grammar("guided_grammar", asked.guided_grammar),
        *_grammar("structured_outputs", newer.grammar),
    ]
    if len(found) > 1:
        fields = list(dict.fromkeys(each.field for each in found))
        also = f", by {' and '.join(fields)}" if len(fields) > 1 else ""
        raise InvalidArgument(f"{fields[-1]}: the answer is constrained in more than one way{also}")
    return found[0] if found else None


def _of_format(asked: ResponseFormat | None) -> list[Constraint]:
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return _json("response_format", {"type": "object"})
    schema = asked.json_schema.schema_ if asked.json_schema is not None else None
    if schema is None:
        raise InvalidArgument("response_format: json_schema has no schema")
    return _json("response_format", schema)


def _json(field: str, schema: Schema | None) -> list[Constraint]:
    if schema is None:
        return []
    text = schema if isinstance(schema, str) else _dumped(field, schema)
    if not text:
        raise InvalidArgument(f"{field}: the schema is empty")
    return [Constraint(field, generation_pb2.StructuredOutput(json_schema=text))]


def _dumped(field: str, schema: dict[str, object]) -> str:
    """Both writers are compiled code: one in Python takes a millisecond for each kilobyte that lies deep. The
    first takes milliseconds for the largest body, the second writes only what may be taken."""
    try:
        text = json.dumps(schema) if len(to_json(schema)) <= MAX_GRAMMAR_BYTES else None
    except (RecursionError, ValueError) as error:
        raise InvalidArgument(f"{field}: is nested too deep") from error
    if text is None or len(text) > MAX_GRAMMAR_BYTES:
        raise _too_large(field)
    return text


def _too_large(field: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: at most {MAX_GRAMMAR_BYTES} bytes are taken")


def _regex(field: str, regex: str | None) -> list[Constraint]:
    return [] if regex is None else [Constraint(field, generation_pb2.StructuredOutput(regex=regex))]


def _grammar(field: str, grammar: str | None) -> list[Constraint]:
    if grammar is None:
        return []
    text = grammar if _is_lark(grammar) else _from_gbnf(field, grammar)
    return [Constraint(field, generation_pb2.StructuredOutput(grammar=text))]


def _is_lark(grammar: str) -> bool:
    starts = ("start:", "start ", "%llguidance")
    return "::=" not in grammar or any(line.lstrip().startswith(starts) for line in grammar.splitlines())


def _from_gbnf(field: str, grammar: str) -> str:
    """llama.cpp's form, which vLLM takes too; our own API has Lark's alone."""
    if len(grammar) > MAX_GBNF_CHARACTERS:
        raise InvalidArgument(f"{field}: in GBNF at most {MAX_GBNF_CHARACTERS} characters are taken")
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library raises nothing narrower, and runs out of stack
        raise InvalidArgument(f"{field}: is no GBNF: {error}") from error


def _one_of(field: str, choices: list[str] | None) -> str | None:
    if choices is None:
        return None
    if not choices:
        raise InvalidArgument(f"{field}: there is nothing to choose from")
    if sum(map(len, choices)) + len(choices) * len("(?:)|") - 1 > MAX_GRAMMAR_BYTES:
        raise _too_large(field)
    return "|".join(f"(?:{re.escape(choice)})" for choice in choices)
