"""Which sequences compute what in the next step: pure bookkeeping over the block manager.

Order: running sequences that decode, running ones that catch up, preempted ones, new ones first come
first served; all by arrival; then drafts for those that decode, from what is left of everything. A sequence
gets the blocks of all its tokens when it starts, so only decoding takes blocks later, and those that only
drafts need go back after the step. A start leaves one growth block for each running or reserved sequence that
will still grow. When growth finds no block, the youngest sequence is preempted: it gives its blocks
back, and later computes its tokens again (most of them, usually, a prefix hit).
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.batch import BatchRow
from engine.block_manager import BlockManager
from engine.errors import NoRoom
from engine.prefix import BlockHash, extend_hashes
from engine.reservations import BlockReservation, Reservations
from engine.sequence import Sequence, SequenceState
from engine.speculation import Speculator


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, end)` of one sequence, and drafts of those behind them, to compute in this step."""

    sequence: Sequence
    start: int
    end: int
    is_sampling: bool  # it closes the gap, so its last row draws the next token
    drafts: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.end - self.start + len(self.drafts)

    @property
    def num_draws(self) -> int:
        """Behind the last token, and behind each draft: that one counts if the drafts up to it are right."""
        return 1 + len(self.drafts) if self.is_sampling else 0

    def row(self) -> BatchRow:
        token_ids = [*self.sequence.token_ids[self.start : self.end], *self.drafts]
        return BatchRow(token_ids, self.start, self.sequence.block_table)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_recompute_tokens: int


class Scheduler:
    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        reservations: Reservations,
        root: BlockHash | None,
        speculator: Speculator | None = None,
    ) -> None:
        """`root` is where prefix hashes begin; None: no prefix cache."""
        self._limits = limits
        self._blocks = blocks
        self._reservations = reservations
        self._root = root
        self._speculator = speculator
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.preempted: list[Sequence] = []  # by arrival
        self.running: dict[str, Sequence] = {}
        self.num_preemptions = 0

    @property
    def num_living(self) -> int:
        return len(self.waiting) + len(self.preempted) + len(self.running)

    def living(self) -> Iterator[Sequence]:
        yield from self.running.values()
        yield from self.preempted
        yield from self.waiting.values()

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)

    def add(self, sequence: Sequence) -> None:
        self.waiting[sequence.sequence_id] = sequence

    def add_running(self, sequence: Sequence) -> None:
        """Its KV is in place already."""
        sequence.move(SequenceState.RUNNING)
        self.running[sequence.sequence_id] = sequence

    def reserve(self, token_ids: list[int], max_kv_tokens: int) -> BlockReservation:
        """Blocks and a running place for a sequence whose KV comes from elsewhere. Every full block of it may
        be a prefix hit: its last token was drawn, and its logits are not needed here. NoRoom otherwise.
        """
        num_places = len(self.running) + len(self.preempted) + self._reservations.num_reserved
        if num_places >= self._limits.max_num_seqs:
            raise NoRoom(f"all {self._limits.max_num_seqs} running places are taken")
        if self.preempted:
            raise NoRoom("preempted sequences go first")
        hits = self.match_tokens(token_ids, [], len(token_ids))
        num_blocks = self.num_blocks_for(len(token_ids))
        will_grow = self.num_blocks_for(max_kv_tokens) > num_blocks
        if not self._blocks.can_take(hits, num_blocks - len(hits), self.num_growth_blocks + will_grow):
            raise NoRoom(f"{num_blocks - len(hits)} blocks wanted, {self._blocks.num_available} available")
        return self._reservations.take(hits, num_blocks - len(hits), len(token_ids), will_grow)

    def remove(self, sequence: Sequence, state: SequenceState) -> None:
        """It leaves in `state`. Its blocks stay in its table: they are the caller's to release."""
        if sequence.state is SequenceState.RUNNING:
            del self.running[sequence.sequence_id]
        elif sequence.state is SequenceState.WAITING:
            del self.waiting[sequence.sequence_id]
        else:
            self.preempted.remove(sequence)
        sequence.move(state)

    def schedule(self) -> list[Chunk]:
        running = sorted(self.running.values(), key=_arrival)
        chunks = [
            _chunk(sequence, 1)
            for sequence in running
            if sequence.num_missing_tokens == 1 and self._grow(sequence)
        ]
        budget = self._limits.max_num_batched_tokens - len(chunks)
        recompute = self._limits.max_recompute_tokens if chunks else budget
        if budget == 0:
            return chunks
        for sequence in self._catching_up(running):
            allowed = min(budget, recompute) if sequence.is_recomputing else budget
            num_tokens = min(allowed, sequence.num_missing_tokens)
            if num_tokens == 0:
                continue
            chunks.append(_chunk(sequence, num_tokens))
            budget -= num_tokens
            recompute -= num_tokens if sequence.is_recomputing else 0
            if budget == 0:
                break
        return chunks if self._speculator is None else self._with_drafts(self._speculator, chunks, budget)

    def _catching_up(self, running: list[Sequence]) -> Iterator[Sequence]:
        """Those with more than one token to compute; starts preempted and new ones while there is room."""
        for sequence in running:
            if sequence.state is SequenceState.RUNNING and sequence.num_missing_tokens > 1:
                yield sequence
        while self.preempted and self._start(self.preempted[0]):
            yield self.preempted.pop(0)
        while self.waiting and not self.preempted:
            sequence = next(iter(self.waiting.values()))
            if not self._start(sequence):
                break
            del self.waiting[sequence.sequence_id]
            yield sequence

    def _with_drafts(self, speculator: Speculator, chunks: list[Chunk], budget: int) -> list[Chunk]:
        """Adds drafts to those that decode, but not to a first token here: that one closes a prefill."""
        num_rows = sum(chunk.num_tokens for chunk in chunks)
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            if not chunk.is_sampling or chunk.num_tokens > 1 or sequence.num_new_tokens == 0:
                continue
            room = min(budget, sequence.max_kv_tokens - sequence.num_tokens)
            drafts = speculator.draft(sequence, room, num_rows)
            if drafts:
                drafts = drafts[: self._room_behind(sequence, len(drafts))]
                chunks[index] = replace(chunk, drafts=tuple(drafts))
                budget -= len(drafts)
        return chunks

    def _room_behind(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of so many tokens behind its own there is room for: in its last block, and in blocks that
        nobody, itself included, will need next.
        """
        num_blocks = len(sequence.block_table)
        num_new = self.num_blocks_for(sequence.num_tokens + num_tokens) - num_blocks
        if num_new > 0:
            growth = self.num_growth_blocks - self._growth_of(sequence, num_blocks)
            growth += self._growth_of(sequence, num_blocks + num_new)
            if not self._blocks.can_take([], num_new, spare=growth):
                return num_blocks * self._limits.block_size - sequence.num_tokens
            sequence.block_table += self._blocks.take([], num_new)
        return num_tokens

    def drop_unused(self, sequence: Sequence) -> None:
        """Gives back the blocks behind its last token: those of drafts that were wrong."""
        num_used = self.num_blocks_for(sequence.num_tokens)
        self._blocks.release(sequence.block_table[num_used:])
        del sequence.block_table[num_used:]

    def _start(self, sequence: Sequence) -> bool:
        """Takes its blocks and makes it run, if there is a place and room."""
        if len(self.running) + self._reservations.num_reserved >= self._limits.max_num_seqs:
            return False
        hits = self.match(sequence)
        num_new = self.num_blocks_for(sequence.num_tokens) - len(hits)
        growth = self.num_growth_blocks + self._growth_of(sequence, len(hits) + num_new)
        if not self._blocks.can_take(hits, num_new, spare=growth):
            return False
        sequence.block_table = self._blocks.take(hits, num_new)
        sequence.num_computed_tokens = len(hits) * self._limits.block_size
        sequence.num_registered_blocks = len(hits)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        sequence.move(SequenceState.RUNNING)
        self.running[sequence.sequence_id] = sequence
        return True

    def match(self, sequence: Sequence) -> list[int]:
        """Its longest cached prefix, but never its last token: that one must run to give logits."""
        return self.match_tokens(sequence.token_ids, sequence.block_hashes, sequence.num_tokens - 1)

    def match_tokens(self, token_ids: list[int], hashes: list[BlockHash], num_tokens: int) -> list[int]:
        """Cached blocks of `token_ids[:num_tokens]`; keeps the names it makes in `hashes`."""
        if self._root is None:
            return []
        block_size = self._limits.block_size
        num_blocks = num_tokens // block_size
        extend_hashes(hashes, self._root, token_ids, block_size, num_blocks)
        return self._blocks.match(hashes[:num_blocks])

    def register_computed(self, sequence: Sequence) -> None:
        """Name the blocks that are full and computed, so that others can hit them."""
        num_full = sequence.num_computed_tokens // self._limits.block_size
        if self._root is None or num_full == sequence.num_registered_blocks:
            return
        extend_hashes(
            sequence.block_hashes, self._root, sequence.token_ids, self._limits.block_size, num_full
        )
        for index in range(sequence.num_registered_blocks, num_full):
            self._blocks.register(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_registered_blocks = num_full

    @property
    def num_growth_blocks(self) -> int:
        """The watermark: what those who run or have reserved may take next."""
        running = sum(self._growth_of(s, len(s.block_table)) for s in self.running.values())
        return running + self._reservations.num_growth_blocks

    def _growth_of(self, sequence: Sequence, num_blocks: int) -> int:
        return int(self.num_blocks_for(sequence.max_kv_tokens) > num_blocks)

    def _grow(self, sequence: Sequence) -> bool:
        """A block for its newest token, if it needs one; may preempt younger ones or itself."""
        if sequence.state is not SequenceState.RUNNING:
            return False  # preempted for an older one a moment ago
        while self.num_blocks_for(sequence.num_tokens) > len(sequence.block_table):
            if self._blocks.can_take([], 1):
                sequence.block_table += self._blocks.take([], 1)
                continue
            victim = self._youngest_from(sequence.arrival)
            if victim is None:
                return False  # it holds its blocks for somebody: it waits
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _youngest_from(self, arrival: int) -> Sequence | None:
        """Only itself and younger ones give way: older ones may have their place in this step already."""
        candidates = [s for s in self.running.values() if s.arrival >= arrival and not s.hold_blocks]
        return max(candidates, key=_arrival, default=None)

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.sequence_id]
        self._blocks.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_registered_blocks = 0
        sequence.is_recomputing = True
        sequence.move(SequenceState.PREEMPTED)
        insort(self.preempted, sequence, key=_arrival)
        self.num_preemptions += 1


def _chunk(sequence: Sequence, num_tokens: int) -> Chunk:
    start = sequence.num_computed_tokens
    return Chunk(sequence, start, start + num_tokens, is_sampling=num_tokens == sequence.num_missing_tokens)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
