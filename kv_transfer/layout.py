"""Two engines can hand KV to each other only where their layouts are equal."""

from __future__ import annotations

from dataclasses import fields

from engine.layout import KVLayout
from pdserve.v1.errors import FailedPrecondition

__all__ = ["KVLayout", "differences", "require_equal"]


def differences(ours: KVLayout, theirs: KVLayout) -> tuple[str, ...]:
    """One line for each field that differs; empty where the layouts are equal."""
    return tuple(
        f"{field.name}: {getattr(ours, field.name)} here, {getattr(theirs, field.name)} there"
        for field in fields(ours)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    )


def require_equal(ours: KVLayout, theirs: KVLayout) -> None:
    """Raises FailedPrecondition that names what differs."""
    found = differences(ours, theirs)
    if found:
        raise FailedPrecondition(f"KV layouts differ: {'; '.join(found)}", reason="LAYOUT_MISMATCH")
