"""Which workers a sequence goes to: pure functions of what the router knows at this moment.

Load that this router has sent and that no report shows yet is part of the views, so a burst does not see
one and the same picture. Among equals the one that was chosen longest ago comes first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillView:
    instance_id: str
    # Of this router: sent, and no first token yet.
    outstanding_tokens: int
    # Outstanding ones and, as far as its last report tells, other routers'.
    queued_tokens: int
    last_chosen: int


@dataclass(frozen=True, slots=True)
class DecodeView:
    instance_id: str
    # As reported, less what this router has asked for since.
    free_blocks: int
    # Running, reserved, or asked for.
    num_sequences: int
    last_chosen: int


def can_start_soon(view: PrefillView, num_tokens: int, backlog_limit: int) -> bool:
    """A bounded backlog; a prompt longer than the bound goes where nothing is out."""
    return view.outstanding_tokens == 0 or view.outstanding_tokens + num_tokens <= backlog_limit


def choose_prefill(
    views: Sequence[PrefillView],
    num_tokens: int,
    backlog_limit: int,
    *,
    prefer: str | None = None,
    avoid: Collection[str] = (),
) -> str | None:
    """The least loaded worker that can start the prompt soon. None: let it wait in the queue."""
    open_views = [view for view in views if can_start_soon(view, num_tokens, backlog_limit)]
    if not open_views:
        return None
    best = min(
        open_views,
        key=lambda view: (
            view.instance_id in avoid,
            view.instance_id != prefer,
            view.queued_tokens,
            view.last_chosen,
        ),
    )
    return best.instance_id


def rank_decode(
    views: Sequence[DecodeView], *, prefer: str | None = None, avoid: Collection[str] = ()
) -> tuple[str, ...]:
    """All of them, best first: the router asks one after the other until one has room."""
    ranked = sorted(
        views,
        key=lambda view: (
            view.instance_id in avoid,
            view.instance_id != prefer,
            -view.free_blocks,
            view.num_sequences,
            view.last_chosen,
        ),
    )
    return tuple(view.instance_id for view in ranked)


def choose_colocated(
    prefills: Sequence[PrefillView],
    decodes: Sequence[DecodeView],
    num_tokens: int,
    backlog_limit: int,
    *,
    prefer: str | None = None,
    avoid: Collection[str] = (),
) -> str | None:
    """One worker for both phases: by queued prompt tokens, then as for decoding."""
    queued = {
        view.instance_id: view.queued_tokens
        for view in prefills
        if can_start_soon(view, num_tokens, backlog_limit)
    }
    order = rank_decode([view for view in decodes if view.instance_id in queued])
    return min(
        order,
        key=lambda instance_id: (
            instance_id in avoid,
            instance_id != prefer,
            queued[instance_id],
            order.index(instance_id),
        ),
        default=None,
    )
