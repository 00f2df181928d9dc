"""What may leave next, and what has left: by whole blocks, by layers, and from one to the other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.coverage import Coverage
from kv_transfer.frame import Blocks, TransferKey
from kv_transfer.progress import Progress, Span

PLENTY = 1000


def sent(progress: Progress, max_cells: int = PLENTY) -> list[tuple[range, range]]:
    """Everything that may leave now, noted."""
    spans: list[Span] = []
    while (span := progress.next(max_cells)) is not None:
        progress.note(span)
        spans.append(span)
    return [(span.blocks, span.layers) for span in spans]


def test_finished_blocks_leave_whole_and_in_order() -> None:
    progress = Progress(5, 1, 4)
    assert sent(progress) == []
    assert progress.offer_blocks(3)
    assert not progress.offer_blocks(3)
    assert sent(progress, max_cells=7) == [(range(1, 2), range(4)), (range(2, 3), range(4))]
    progress.offer_blocks(5)
    assert not progress.is_complete
    assert sent(progress) == [(range(3, 5), range(4))]
    assert progress.is_complete


def test_the_last_chunk_leaves_by_groups_of_layers() -> None:
    progress = Progress(5, 0, 4)
    progress.offer_blocks(2)
    assert sent(progress) == [(range(2), range(4))]
    for ready, group in ((1, range(1)), (3, range(1, 3)), (4, range(3, 4))):
        progress.offer_layers(ready)
        assert sent(progress) == [(range(2, 5), group)]
        assert progress.is_complete == (ready == 4)


def test_whole_blocks_that_wait_go_before_layers_of_the_rest() -> None:
    progress = Progress(4, 0, 4)
    progress.offer_blocks(2)
    progress.offer_layers(2)
    assert sent(progress) == [(range(2), range(4)), (range(2, 4), range(2))]
    progress.offer_blocks(4)
    assert sent(progress) == [(range(2, 4), range(2, 4))]
    assert progress.is_complete


def test_layers_of_which_none_has_left_leave_as_whole_blocks_at_the_end() -> None:
    progress = Progress(4, 0, 4)
    progress.offer_layers(2)
    progress.offer_blocks(4)
    assert sent(progress) == [(range(4), range(4))]


def test_a_group_that_does_not_fit_is_cut_by_blocks_and_kept_until_all_have_it() -> None:
    progress = Progress(3, 0, 4)
    progress.offer_layers(2)
    first = progress.next(4)
    assert first == Span(range(2), range(2))
    progress.note(first)
    progress.offer_layers(4)
    assert progress.num_layers_due == 2
    assert progress.next(1) is None
    assert sent(progress, 4) == [(range(2, 3), range(2)), (range(2), range(2, 4)), (range(2, 3), range(2, 4))]


def test_nothing_is_left_of_a_wholly_cached_sequence() -> None:
    progress = Progress(3, 3, 4)
    assert progress.is_complete
    progress.offer_layers(4)
    assert progress.num_layers_due == 0
    assert sent(progress) == []


OFFER = st.tuples(st.sampled_from(["blocks", "layers"]), st.integers(0, 8), st.integers(0, 40))


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 6), st.lists(OFFER, max_size=12))
def test_whatever_is_offered_each_cell_leaves_once_and_only_when_it_is_final(
    num_blocks: int, num_cached: int, num_layers: int, offers: list[tuple[str, int, int]]
) -> None:
    num_cached = min(num_cached, num_blocks)
    progress = Progress(num_blocks, num_cached, num_layers)
    coverage = Coverage(num_blocks, num_layers, num_cached)
    final = np.zeros((num_blocks, num_layers), bool)
    are_layers_offered = False
    for what, count, max_cells in [*offers, ("blocks", num_blocks, PLENTY)]:
        if what == "layers":
            are_layers_offered = True
            progress.offer_layers(min(count, num_layers))
            final[:, :count] = True
        elif count >= num_blocks or not are_layers_offered:  # then only the end can come
            progress.offer_blocks(count)
            final[:count] = True
        for blocks, layers in sent(progress, max_cells):
            assert len(blocks) * len(layers) <= max_cells
            assert final[blocks.start : blocks.stop, layers.start : layers.stop].all()
            frame = Blocks(TransferKey("a", 0), 1, blocks.start, len(blocks), layers.start, len(layers), 0)
            assert coverage.is_due(frame)
            coverage.add(frame)
    assert progress.is_complete
    assert coverage.num_missing == 0
