"""Constraints that tiny models with random weights get to the end of, and what their answers are held to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pdserve.requests import GenerateOptions
from pdserve.v1 import generation_pb2

Kind = Literal["json_schema", "regex", "grammar"]

# Short in every way, so that a random walk ends: no number grows, no text, and no space.
PERSON: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "likes": {
            "type": "array",
            "items": {"enum": ["tea", "coffee", "mäte"]},
            "minItems": 1,
            "maxItems": 2,
        },
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "likes", "member"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
WORDS = r"[a-z]{3,8}( [a-z]{2,6}){2,4}[.!?]"
SUM = """
start: number (sign number){1,3}
number: /[1-9][0-9]?/
sign: "+" | "-" | " × "
"""


def is_person(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "age", "likes", "member"]
    likes = value["likes"]
    return (
        re.fullmatch("[A-Z][a-z]{1,6}", value["name"]) is not None
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 130
        and 1 <= len(likes) <= 2
        and set(likes) <= {"tea", "coffee", "mäte"}
        and isinstance(value["member"], bool)
    )


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[1-9][0-9]?((\+|-| × )[1-9][0-9]?){1,3}", text) is not None


@dataclass(frozen=True)
class Constraint:
    kind: Kind
    source: str
    holds: Callable[[str], bool]
    max_tokens: int = 160

    @property
    def options(self) -> GenerateOptions:
        named: dict[str, object] = {self.kind: self.source, "max_tokens": self.max_tokens}
        return named  # type: ignore[return-value]

    def message(self) -> generation_pb2.StructuredOutput:
        return generation_pb2.StructuredOutput(**{self.kind: self.source})


CONSTRAINTS: dict[str, Constraint] = {
    "schema": Constraint("json_schema", json.dumps(PERSON), is_person),
    "date": Constraint("regex", DATE, lambda text: re.fullmatch(DATE, text) is not None),
    "words": Constraint("regex", WORDS, lambda text: re.fullmatch(WORDS, text) is not None),
    "sum": Constraint("grammar", SUM, is_sum),
}
