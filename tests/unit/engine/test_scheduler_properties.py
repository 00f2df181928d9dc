"""Whatever comes and goes, a step keeps to its limits, every block has its owners, and all that stays is
finished in a bounded number of steps. The model is left out: any token is drawn."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_manager import BlockManager, BlockState
from engine.errors import NoRoom
from engine.prefill_order import ShortestFirst
from engine.prefix import root_hash
from engine.request import SequenceRequest
from engine.reservations import BlockReservation, Reservations
from engine.sampling import SamplingParams, StopConditions
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence, SequenceState

NUM_BLOCKS = 12
LIMITS = SchedulerLimits(block_size=4, max_num_seqs=4, max_num_batched_tokens=10, max_recompute_tokens=6)
# No sequence is longer than the pool.
lengths = st.integers(1, 24)
outputs = st.integers(1, 20)


class Steps(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS)
        self.reservations = Reservations(self.blocks)
        self.scheduler = self.make_scheduler()
        self.reserved: list[BlockReservation] = []
        self.num_added = 0
        self.num_finished = 0

    def make_scheduler(self) -> Scheduler:
        return Scheduler(LIMITS, self.blocks, self.reservations, root_hash("any"))

    @rule(length=lengths, max_tokens=outputs, seed=st.integers(0, 2))
    def add(self, length: int, max_tokens: int, seed: int) -> None:
        """Prompts of one seed begin alike: they hit each other's blocks."""
        request = SequenceRequest(
            sequence_id=f"s{self.num_added}",
            prompt_token_ids=tuple(100 * seed + index for index in range(length)),
            known_token_ids=(),
            sampling=SamplingParams(),
            stop=StopConditions(max_tokens, ignore_eos=True),
        )
        self.scheduler.add(Sequence(request, self.num_added, 0.0))
        self.num_added += 1

    @rule(length=lengths, more=outputs)
    def reserve(self, length: int, more: int) -> None:
        try:
            self.reserved.append(self.scheduler.reserve(list(range(length)), length + more))
        except NoRoom:
            return
        # Its growth was thought of, too.
        assert self.blocks.num_available >= self.scheduler.num_growth_blocks

    @precondition(lambda self: self.reserved)
    @rule(is_quarantined=st.booleans())
    def end_reservation(self, is_quarantined: bool) -> None:
        reservation = self.reserved.pop(0)
        if is_quarantined:
            self.reservations.quarantine(reservation)
        self.reservations.release(reservation)

    @precondition(lambda self: self.scheduler.num_living)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        living = {sequence.sequence_id: sequence for sequence in self.scheduler.living()}
        self._leave(living[data.draw(st.sampled_from(sorted(living)))], SequenceState.CANCELLED)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        ran = set(self.scheduler.running)
        chunks = self.scheduler.schedule()
        if set(self.scheduler.running) - ran:  # a start leaves what those who run will need next
            assert self.blocks.num_available >= self.scheduler.num_growth_blocks
        assert sum(chunk.num_tokens for chunk in chunks) <= LIMITS.max_num_batched_tokens
        assert len({chunk.sequence.sequence_id for chunk in chunks}) == len(chunks)
        written: list[int] = []
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.state is SequenceState.RUNNING
            assert chunk.start == sequence.num_computed_tokens < chunk.end <= sequence.num_tokens
            assert chunk.is_sampling == (chunk.end == sequence.num_tokens)
            assert len(sequence.block_table) * LIMITS.block_size >= chunk.end
            first, last = chunk.start // LIMITS.block_size, (chunk.end - 1) // LIMITS.block_size
            written += sequence.block_table[first : last + 1]
        assert len(set(written)) == len(written), "two sequences write one block"
        for chunk in chunks:
            self._apply(chunk.sequence, chunk.end, chunk.is_sampling)

    def _apply(self, sequence: Sequence, end: int, is_sampling: bool) -> None:
        sequence.num_computed_tokens = end
        self.scheduler.register_computed(sequence)
        if not is_sampling:
            return
        sequence.is_recomputing = False
        sequence.append(1000 + sequence.arrival)
        if sequence.num_output_tokens == sequence.request.stop.max_tokens:
            self._leave(sequence, SequenceState.FINISHED)
            self.num_finished += 1

    def _leave(self, sequence: Sequence, state: SequenceState) -> None:
        self.scheduler.remove(sequence, state)
        self.blocks.release(sequence.block_table)

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_integrity()
        assert len(self.scheduler.running) + self.reservations.num_reserved <= LIMITS.max_num_seqs
        held = [block for sequence in self.scheduler.living() for block in sequence.block_table]
        self.blocks.check_integrity(
            {
                BlockState.HELD: [*held, *self.reservations.cached_blocks()],
                BlockState.RESERVED: list(self.reservations.reserved_blocks()),
                BlockState.QUARANTINED: list(self.reservations.quarantined_blocks()),
            }
        )

    def teardown(self) -> None:
        """Nobody is left behind."""
        while self.reserved:
            self.end_reservation(False)
        to_finish = self.num_finished + self.scheduler.num_living
        # Each step computes a token at least; preemption may compute one several times.
        for _ in range(40 * 44 * max(1, self.scheduler.num_living)):
            if not self.scheduler.num_living:
                break
            self._step()
            self.books_balance()
        assert self.num_finished == to_finish
        assert self.blocks.num_available == NUM_BLOCKS


class StepsByShortest(Steps):
    """Time goes by a second a step, and nobody is overtaken any more after 30."""

    def make_scheduler(self) -> Scheduler:
        clock = itertools.count()
        order = ShortestFirst(30.0, lambda: float(next(clock)))
        return Scheduler(LIMITS, self.blocks, self.reservations, root_hash("any"), order=order)


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStepsByShortest = StepsByShortest.TestCase
TestStepsByShortest.settings = TestSteps.settings
