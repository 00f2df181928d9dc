"""A sequence's grammar, compiled on no thread that others wait for."""

from __future__ import annotations

import asyncio

from engine.grammar import Grammar
from engine.guidance import Grammars
from pdserve.v1 import worker_pb2
from pdserve.v1.structured import grammar_text


async def grammar_of(grammars: Grammars, spec: worker_pb2.SequenceSpec) -> Grammar | None:
    """With the known output behind it; None: the output is free. Raises InvalidArgument or GrammarError."""
    if not spec.sampling.HasField("structured"):
        return None
    text = grammar_text(spec.sampling.structured)
    return await asyncio.wrap_future(grammars.prepare(text, tuple(spec.known_token_ids)))
