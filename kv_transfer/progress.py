"""What of a transfer may leave, and what has left."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """These layers of these blocks of a sequence."""

    blocks: range
    layers: range

    @property
    def num_cells(self) -> int:
        return len(self.blocks) * len(self.layers)


class Progress:
    """Blocks that are final as wholes leave whole, in order. When layers of all blocks are offered, what has
    not left by then leaves by layers: all blocks of the layers that are there, then of the next layers.
    """

    def __init__(self, num_blocks: int, num_cached_blocks: int, num_layers: int) -> None:
        self._num_blocks = num_blocks
        self._num_layers = num_layers
        self._num_ready_blocks = num_cached_blocks
        self._num_ready_layers = 0
        self._next_block = num_cached_blocks
        # The layers of the last frame, and the block from which on they leave by layers, if they do.
        self._layers = range(0)
        self._rest: int | None = None

    @property
    def is_complete(self) -> bool:
        """Nothing is left to send, nor will be."""
        is_last = self._rest is None or self._layers.stop == self._num_layers
        return self._next_block == self._num_blocks and is_last

    @property
    def num_layers_due(self) -> int:
        """Of what is sent next; 0 if nothing may be."""
        due = self._due()
        return len(due.layers) if due.blocks else 0

    def offer_blocks(self, num_blocks: int) -> bool:
        """Blocks [0, num_blocks) are final. Whether that is news."""
        if self._rest is not None:
            return num_blocks >= self._num_blocks and self.offer_layers(self._num_layers)
        is_news = num_blocks > self._num_ready_blocks
        if is_news:
            self._num_ready_blocks = min(num_blocks, self._num_blocks)
        return is_news

    def offer_layers(self, num_layers: int) -> bool:
        """Layers [0, num_layers) of all blocks are final. Whether that is news."""
        is_news = num_layers > self._num_ready_layers
        if is_news:
            self._num_ready_layers = num_layers
        return is_news

    def next(self, max_cells: int) -> Span | None:
        """What to send now, at most so many cells; None where not even one block's part is due or fits."""
        due = self._due()
        if not due.num_cells or max_cells < len(due.layers):
            return None
        return Span(due.blocks[: max_cells // len(due.layers)], due.layers)

    def note(self, sent: Span) -> None:
        if len(sent.layers) < self._num_layers and self._rest is None:
            self._rest = sent.blocks.start
        self._layers = sent.layers
        self._next_block = sent.blocks.stop

    def _due(self) -> Span:
        blocks = range(self._next_block, self._num_blocks)
        if self._rest is None:
            if self._next_block < self._num_ready_blocks:
                return Span(range(self._next_block, self._num_ready_blocks), range(self._num_layers))
            return Span(blocks, range(self._num_ready_layers))
        if blocks:
            return Span(blocks, self._layers)
        return Span(range(self._rest, self._num_blocks), range(self._layers.stop, self._num_ready_layers))
