"""Ray's label selectors: what a node's label must be for a worker to be placed there.

    a            the label is a              in(a, b)     it is one of these
    !a           it is not a                 !in(a, b)    it is none of these

A node without the label satisfies only the selectors with "!". Ray decides; this is to say why it waits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ACCELERATOR_TYPE = "ray.io/accelerator-type"
NODE_ID = "ray.io/node-id"

_VALUE = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_SELECTOR = re.compile(rf"(?P<no>!?)(?:in\((?P<many>{_VALUE}(?:, ?{_VALUE})*)\)|(?P<one>{_VALUE}))")


def checked_selector(selector: str) -> str:
    """Raises ValueError."""
    if _SELECTOR.fullmatch(selector) is None:
        raise ValueError(f"{selector!r} is no label selector; write a, !a, in(a, b) or !in(a, b)")
    return selector


def is_met(selectors: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels satisfies all selectors."""
    return all(_allows(selector, labels.get(key)) for key, selector in selectors.items())


def _allows(selector: str, value: str | None) -> bool:
    match = _SELECTOR.fullmatch(selector)
    if match is None:
        raise ValueError(f"{selector!r} is no label selector")
    named = re.split(r", ?", match["many"]) if match["many"] else [match["one"]]
    return (value in named) != bool(match["no"])
