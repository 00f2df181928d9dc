"""Telling somebody, inside a step, how many layers of it are done: a prompt's K and V can leave by layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.chunk import Chunk
from engine.layout import KVLayout

# A prompt's last chunk is told in at most so many groups of layers.
_MAX_GROUPS = 6
# Less K and V than this is not worth a message of its own.
MIN_GROUP_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """Tokens `[start, end)`, the last of a sequence's prompt (and known output), are in this step. K and V of
    those before are in the pool already.
    """

    sequence_id: str
    start: int
    end: int


# Called on the engine's thread: the first so many layers' K and V of these are in the pool. Must not block.
LayerListener = Callable[[Sequence[PromptEnd], int], None]


@dataclass(frozen=True, slots=True)
class LayerWatch:
    """One step's: `tell(num_layers)` is wanted behind so many layers, for each of `stops`, in order."""

    stops: tuple[int, ...]
    tell: Callable[[int], None]


def watch_ends(
    listener: LayerListener, chunks: Iterable[Chunk], layout: KVLayout, min_group_bytes: int
) -> LayerWatch | None:
    """None: no prompt ends in this step. Each that does has stops by its own size."""
    ends: defaultdict[int, list[PromptEnd]] = defaultdict(list)
    for chunk in chunks:
        if chunk.is_sampling and chunk.sequence.num_new_tokens == 0:
            num_bytes = layout.num_blocks_for(chunk.end - chunk.start) * layout.block_bytes
            for stop in layer_stops(layout.num_layers, num_bytes // min_group_bytes):
                ends[stop].append(PromptEnd(chunk.sequence.sequence_id, chunk.start, chunk.end))
    if not ends:
        return None
    return LayerWatch(tuple(sorted(ends)), lambda num_layers: listener(ends[num_layers], num_layers))


def layer_stops(num_layers: int, num_groups: int) -> tuple[int, ...]:
    """Even groups, but a thin one at the end, which is all that is left to ship when the token is drawn. The
    first stop is before the first layer: what earlier steps or the prefix cache have can leave then.
    """
    num_groups = min(_MAX_GROUPS, num_groups)
    if num_groups < 2:
        return (0,)
    even = [num_layers * group // (num_groups - 1) for group in range(num_groups - 1)]
    last = num_layers - max(1, num_layers // 15)
    return tuple(sorted({*even, last}))
