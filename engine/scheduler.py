"""Which sequences compute what in the next step: pure bookkeeping over the block manager.

Order: running sequences that decode, running ones that catch up, preempted ones, new ones first come first
served; all by arrival. (With `ShortestFirst`, behind those that decode: preempted ones start, those go on
whose answers had begun, then running and new ones by what is left of their prompts.) Then drafts for those
that decode, from what is left of everything. A sequence gets the blocks of all its tokens when it starts, so
only decoding takes blocks later, and those that only drafts need go back after the step. A start leaves one
growth block for each running or reserved sequence that will still grow. When growth finds no block, the
youngest sequence is preempted: it gives its blocks back, and later computes its tokens again (most of them,
usually, a prefix hit).
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from engine.block_manager import BlockManager
from engine.chunk import Chunk
from engine.errors import IntegrityError, NoRoom
from engine.prefill_order import ShortestFirst
from engine.prefix import BlockHash, extend_hashes
from engine.reservations import BlockReservation, Reservations
from engine.sequence import Sequence, SequenceState
from engine.speculation import MAX_ROWS, Speculator
from engine.watermark import Watermark


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
        order: ShortestFirst | None = None,
    ) -> None:
        """`root` is where prefix hashes begin; None: no prefix cache. `order` None: by arrival."""
        self._limits = limits
        self._blocks = blocks
        self._reservations = reservations
        self._root = root
        self._speculator = speculator
        self._order = order
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.preempted: list[Sequence] = []  # by arrival
        self.running: dict[str, Sequence] = {}  # by arrival
        self.num_preemptions = 0
        self._watermark = Watermark(limits.block_size)

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
        if self._order is not None:
            sequence.num_likely_hits = len(self.match(sequence)) * self._limits.block_size
        self.waiting[sequence.sequence_id] = sequence

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
        self._watermark.track(sequence)

    def schedule(self) -> list[Chunk]:
        chunks, behind = self._decoding()
        budget = self._limits.max_num_batched_tokens - len(chunks)
        recompute = self._limits.max_recompute_tokens if chunks else budget
        if budget == 0:
            return chunks
        catching_up = self._catching_up(behind) if self._order is None else self._by(self._order, behind)
        for sequence in catching_up:
            allowed = min(budget, recompute) if sequence.is_recomputing else budget
            num_missing = sequence.num_missing_tokens
            num_tokens = min(allowed, num_missing)
            if num_tokens == 0:
                continue
            start = sequence.num_computed_tokens
            chunks.append(Chunk(sequence, start, start + num_tokens, num_tokens == num_missing))
            budget -= num_tokens
            recompute -= num_tokens if sequence.is_recomputing else 0
            if budget == 0:
                break
        return chunks if self._speculator is None else self._with_drafts(self._speculator, chunks, budget)

    def _decoding(self) -> tuple[list[Chunk], list[Sequence]]:
        """Chunks of those that decode, and those of the running ones that do not."""
        chunks: list[Chunk] = []
        behind: list[Sequence] = []
        for sequence in list(self.running.values()):
            end = len(sequence.token_ids)
            start = sequence.num_computed_tokens
            if start + 1 != end:
                behind.append(sequence)
            elif self._grow(sequence):
                chunks.append(Chunk(sequence, start, end, True))
        return chunks, behind

    def _catching_up(self, behind: list[Sequence]) -> Iterator[Sequence]:
        """Those with more than one token to compute; starts preempted and new ones while there is room."""
        for sequence in behind:
            if sequence.state is SequenceState.RUNNING:
                yield sequence
        while self.preempted and self._start(self.preempted[0]):
            yield self.preempted.pop(0)
        while self.waiting and not self.preempted:
            sequence = next(iter(self.waiting.values()))
            if not self._start(sequence):
                break
            del self.waiting[sequence.sequence_id]
            yield sequence

    def _by(self, order: ShortestFirst, behind: list[Sequence]) -> Iterator[Sequence]:
        """As `_catching_up`, but a new one may go before one that runs. One that finds no room keeps all new
        ones behind it from starting: blocks that come free are for it.
        """
        while self.preempted and self._start(self.preempted[0]):
            behind.append(self.preempted.pop(0))
        can_start = not self.preempted
        ahead = [sequence for sequence in behind if sequence.state is SequenceState.RUNNING]
        for sequence in order.ordered([*ahead, *self.waiting.values()]):
            if sequence.state is SequenceState.RUNNING:
                yield sequence
            elif can_start and self._start(sequence):
                del self.waiting[sequence.sequence_id]
                yield sequence
            else:
                can_start = False

    def _with_drafts(self, speculator: Speculator, chunks: list[Chunk], budget: int) -> list[Chunk]:
        """Adds drafts to those that decode, but not to a first token here: that one closes a prefill."""
        num_rows = sum(chunk.num_tokens for chunk in chunks)
        if num_rows > MAX_ROWS:
            return chunks
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            if not chunk.is_sampling or chunk.num_tokens > 1 or sequence.num_new_tokens == 0:
                continue
            room = min(budget, sequence.max_kv_tokens - sequence.num_tokens)
            drafts = speculator.draft(sequence, room, num_rows)
            if drafts and sequence.matcher is not None:  # others cannot come true
                drafts = drafts[: sequence.matcher.num_possible(drafts)]
            if drafts:
                drafts = drafts[: self._room_behind(sequence, len(drafts))]
                chunks[index] = chunk._replace(drafts=tuple(drafts))
                budget -= len(drafts)
        return chunks

    def _room_behind(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of so many tokens behind its own there is room for: in its last block, and in blocks that
        nobody, itself included, will need next.
        """
        num_blocks = len(sequence.block_table)
        num_new = self.num_blocks_for(sequence.num_tokens + num_tokens) - num_blocks
        if num_new > 0:
            growth = self.num_growth_blocks - sequence.is_growing
            growth += self._watermark.will_grow(sequence, num_blocks + num_new)
            if not self._blocks.can_take([], num_new, spare=growth):
                return num_blocks * self._limits.block_size - sequence.num_tokens
            self._take_more(sequence, num_new)
        return num_tokens

    def drop_unused(self, sequence: Sequence) -> None:
        """Gives back the blocks behind its last token: those of drafts that were wrong."""
        num_used = self.num_blocks_for(sequence.num_tokens)
        self._blocks.release(sequence.block_table[num_used:])
        del sequence.block_table[num_used:]
        self._watermark.track(sequence)

    def _start(self, sequence: Sequence) -> bool:
        """Takes its blocks and makes it run, if there is a place and room."""
        if len(self.running) + self._reservations.num_reserved >= self._limits.max_num_seqs:
            return False
        hits = self.match(sequence)
        num_new = self.num_blocks_for(sequence.num_tokens) - len(hits)
        growth = self.num_growth_blocks + self._watermark.will_grow(sequence, len(hits) + num_new)
        if not self._blocks.can_take(hits, num_new, spare=growth):
            return False
        sequence.block_table = array("i", self._blocks.take(hits, num_new))
        sequence.num_computed_tokens = len(hits) * self._limits.block_size
        sequence.num_registered_blocks = len(hits)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self.add_running(sequence)
        return True

    def add_running(self, sequence: Sequence) -> None:
        """It has its blocks. One that was preempted may be older than some that run."""
        youngest = next(reversed(self.running.values()), sequence)
        sequence.move(SequenceState.RUNNING)
        self.running[sequence.sequence_id] = sequence
        if youngest.arrival > sequence.arrival:
            self.running = {s.sequence_id: s for s in sorted(self.running.values(), key=_arrival)}
        self._watermark.track(sequence)

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
        return self._watermark.num_growing + self._reservations.num_growth_blocks

    def check_integrity(self) -> None:
        """The books kept up to date are what counting gives. Raises IntegrityError."""
        num_growing = sum(
            self._watermark.will_grow(each, len(each.block_table)) for each in self.running.values()
        )
        if num_growing != self._watermark.num_growing:
            raise IntegrityError(f"{num_growing} sequences grow, not {self._watermark.num_growing}")
        arrivals = [sequence.arrival for sequence in self.running.values()]
        if arrivals != sorted(arrivals):
            raise IntegrityError("running sequences are not in order of arrival")

    def _grow(self, sequence: Sequence) -> bool:
        """A block for its newest token, if it needs one; may preempt younger ones or itself."""
        if sequence.state is not SequenceState.RUNNING:
            return False  # preempted for an older one a moment ago
        while len(sequence.token_ids) > len(sequence.block_table) * self._limits.block_size:
            if self._blocks.can_take([], 1):
                self._take_more(sequence, 1)
                continue
            victim = self._youngest_from(sequence.arrival)
            if victim is None:
                return False  # it holds its blocks for somebody: it waits
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _take_more(self, sequence: Sequence, num_blocks: int) -> None:
        sequence.block_table.extend(self._blocks.take([], num_blocks))
        self._watermark.track(sequence)

    def _youngest_from(self, arrival: int) -> Sequence | None:
        """Only itself and younger ones give way: older ones may have their place in this step already."""
        for sequence in reversed(self.running.values()):
            if sequence.arrival < arrival:
                break
            if not sequence.hold_blocks:
                return sequence
        return None

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.sequence_id]
        self._blocks.release(sequence.block_table)
        sequence.block_table = array("i")
        sequence.num_computed_tokens = 0
        sequence.num_registered_blocks = 0
        sequence.is_recomputing = True
        sequence.move(SequenceState.PREEMPTED)
        self._watermark.track(sequence)
        insort(self.preempted, sequence, key=_arrival)
        self.num_preemptions += 1


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
