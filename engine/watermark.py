"""How many blocks must stay free for those who run: one for each that will still grow."""

from __future__ import annotations

from engine.sequence import Sequence, SequenceState


class Watermark:
    """A sequence counts while it runs and may take more blocks than it has. `track` is told of every change
    of its table and its state, so that the count costs nothing to read.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.num_growing = 0

    def will_grow(self, sequence: Sequence, num_blocks: int) -> bool:
        """Beyond `num_blocks`, if it had so many."""
        return sequence.max_kv_tokens > num_blocks * self._block_size

    def track(self, sequence: Sequence) -> None:
        is_running = sequence.state is SequenceState.RUNNING
        is_growing = is_running and self.will_grow(sequence, len(sequence.block_table))
        self.num_growing += is_growing - sequence.is_growing
        sequence.is_growing = is_growing
