"""Refuses rotary embeddings that depend on the longest sequence in the batch.

transformers' "longrope" and "dynamic" switch frequencies for the whole batch when one position passes the
original context. Packed neighbours would then change each other's tokens, so they are served only where
max_model_len keeps every position in the constant range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.errors import UnsupportedModel

_BATCH_DEPENDENT = ("longrope", "dynamic")


def check_rotary(rope_parameters: Mapping[str, object], trained_len: int | None, max_model_len: int) -> None:
    """`rope_parameters` as in the config: one set, or one for each type of layer."""
    for parameters in _sets(rope_parameters):
        kind = str(parameters.get("rope_type", "default"))
        if not any(name in kind for name in _BATCH_DEPENDENT):
            continue
        constant_len = parameters.get("original_max_position_embeddings") or trained_len
        if not isinstance(constant_len, int) or max_model_len > constant_len:
            raise UnsupportedModel(
                f"rotary embedding {kind!r} depends on the longest sequence in the batch beyond "
                f"{constant_len} tokens: set max_model_len to at most that"
            )


def _sets(parameters: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    if "rope_type" in parameters:
        yield parameters
    for value in parameters.values():
        if isinstance(value, Mapping) and "rope_type" in value:
            yield value
