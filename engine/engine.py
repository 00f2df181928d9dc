"""The engine: one model, one KV pool, and sequences that share its steps. It knows no network and no roles.

Everything here happens on one thread, the engine loop's. A step is: schedule → run → sample → apply.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import islice

from engine.block_manager import BlockManager, BlockState
from engine.chunk import Chunk
from engine.config import EngineConfig, ModelConfig
from engine.draw import draw_tokens
from engine.draws import sample_rows, take_draws
from engine.errors import CannotFit, IntegrityError
from engine.guidance import Grammars
from engine.hand_over import check_hand_over
from engine.kv_pool import AllocateMemory, KVPool, allocate_memory
from engine.layer_watch import MIN_GROUP_BYTES, LayerListener, LayerWatch, watch_ends
from engine.limits import check_fits, check_named_ids, engine_limits
from engine.loading import LoadedModel, load_model
from engine.native.sampling import native_draw
from engine.prefill_order import ShortestFirst
from engine.prefix import root_hash
from engine.progress import Progress
from engine.request import (
    EngineLoad,
    NewToken,
    PrefillReport,
    SequenceOutput,
    SequenceRequest,
    StepResult,
    Until,
)
from engine.reservations import BlockReservation, Reservations
from engine.runner import ModelRunner
from engine.sampler import Sampled, sample
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence as LiveSequence
from engine.sequence import SequenceState
from engine.speculation import Speculator, make_speculator
from engine.tally import Tally
from engine.threads import threads_in_use
from engine.weights import no_progress

log = logging.getLogger(__name__)


class Engine:
    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        allocate: AllocateMemory = allocate_memory,
        speculator: Speculator | None = None,
    ) -> None:
        """`speculator` takes the place of the one that the config asks for."""
        self.model = model
        self.device = str(model.device)
        # Of its arithmetic on a CPU; 0 on any other device.
        self.num_threads = threads_in_use() if model.device.type == "cpu" else 0
        self.layout = model.layout(config.block_size)
        self.limits = engine_limits(model, config, self.layout)
        self.pool = KVPool(self.layout, self.limits.num_blocks, model.device, allocate)
        self._blocks = BlockManager(
            self.limits.num_blocks, on_take=self.pool.poison if config.poison_blocks else None
        )
        self._reservations = Reservations(self._blocks)
        if speculator is None and config.speculative is not None:
            speculator = make_speculator(config.speculative)
        self._speculator = speculator
        self._scheduler = Scheduler(
            SchedulerLimits(
                block_size=config.block_size,
                max_num_seqs=self.limits.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_recompute_tokens=config.max_recompute_tokens,
            ),
            self._blocks,
            self._reservations,
            root_hash(self.layout.model_fingerprint) if config.enable_prefix_caching else None,
            speculator,
            ShortestFirst(config.prefill_aging_s) if config.prefill_order == "shortest" else None,
        )
        self.progress = Progress()
        self._runner = ModelRunner(model, self.pool, self.progress)
        self.kernels = self._runner.kernels
        self.speculation = config.speculative
        self.grammars = Grammars(model.folder / "tokenizer.json", model.vocab_size, model.eos_token_ids)
        self._draw = draw_tokens if model.library is None else native_draw(model.library)
        self._layer_listener: LayerListener | None = None
        self._min_group_bytes = MIN_GROUP_BYTES
        self._living: dict[str, LiveSequence] = {}
        self._held: dict[str, array[int]] = {}  # blocks of sequences that left and asked to hold them
        self._next_arrival = 0
        self._tally = Tally()

    @classmethod
    def load(
        cls,
        model: ModelConfig,
        config: EngineConfig,
        progress: Callable[[str], None] = no_progress,
        allocate: AllocateMemory = allocate_memory,
    ) -> Engine:
        """Resolves, converts and loads the model, and takes the pool. Raises ModelError."""
        return cls(load_model(model, progress), config, allocate)

    @property
    def has_work(self) -> bool:
        return bool(self._living)

    def add(self, request: SequenceRequest, accepted_at_s: float | None = None) -> None:
        """Queues a sequence to be computed from its first token. CannotFit if it never can be.

        `accepted_at_s`: since when it waits, in monotonic seconds; None: since now.
        """
        self._check(request)
        sequence = self._accept(request, accepted_at_s)
        self._scheduler.add(sequence)

    def cancel(self, sequence_id: str) -> bool:
        """Drops a sequence in whatever state; False if it is not living. There is no output for it."""
        sequence = self._living.get(sequence_id)
        if sequence is None:
            return False
        self._leave(sequence, SequenceState.CANCELLED)
        return True

    def block_table(self, sequence_id: str) -> tuple[int, ...]:
        """Of a living or held sequence; KeyError otherwise."""
        sequence = self._living.get(sequence_id)
        return tuple(self._held[sequence_id] if sequence is None else sequence.block_table)

    def release_hold(self, sequence_id: str) -> bool:
        """Gives back a held sequence's blocks; a living one will not be held. False if nothing was held."""
        sequence = self._living.get(sequence_id)
        if sequence is not None:
            sequence.hold_blocks = False
        blocks = self._held.pop(sequence_id, None)
        if blocks is None:
            return False
        self._blocks.release(blocks)
        return True

    def reserve(self, token_ids: Sequence[int], max_new_tokens: int) -> BlockReservation:
        """Blocks and a running place for a sequence whose KV will arrive: `token_ids` are prompt and known
        output, and at most `max_new_tokens` more will be drawn. NoRoom (not now) or CannotFit (never).
        """
        check_fits(self.limits, token_ids, max_new_tokens)
        return self._scheduler.reserve(list(token_ids), len(token_ids) + max_new_tokens - 1)

    def release_reservation(self, reservation: BlockReservation) -> None:
        """Reserved or quarantined: its blocks are free again. Idempotent; no effect once consumed."""
        self._reservations.release(reservation)

    def quarantine(self, reservation: BlockReservation) -> None:
        """Somebody may still write into its blocks: nobody gets them until `release_reservation`."""
        self._reservations.quarantine(reservation)

    def add_computed(self, request: SequenceRequest, reservation: BlockReservation, first: NewToken) -> None:
        """The KV of prompt and known tokens is in the reservation's blocks; `first` was drawn elsewhere and
        is not repeated in an output. The sequence decodes from the next step on. ValueError, with nothing
        changed, if the three do not belong together, or `first` is no token here or ends the sequence.
        """
        self._check(request)
        check_hand_over(request, reservation, first, self.limits, self.model.eos_token_ids)
        block_table = array("i", self._reservations.claim(reservation))
        sequence = self._accept(request)
        sequence.block_table = block_table
        sequence.num_computed_tokens = reservation.num_tokens
        self._scheduler.register_computed(sequence)
        sequence.append(first.token_id)
        self._scheduler.add_running(sequence)

    def set_layer_listener(
        self, listener: LayerListener | None, min_group_bytes: int = MIN_GROUP_BYTES
    ) -> None:
        """`listener` is told on the way through a step in which prompts end, how many layers are done: behind
        groups of layers that hold so many bytes of those prompts' K and V, but not behind the last.
        """
        self._layer_listener = listener
        self._min_group_bytes = min_group_bytes

    def step(self) -> StepResult:
        """Computes one batch. A sequence that breaks says so in its output; what raises here is a bug."""
        began_at_s = time.monotonic()
        chunks = self._scheduler.schedule()
        try:
            sampled = self._compute(chunks)
        except Exception as error:  # the model's own code: its sequences fail, others go on
            log.exception("a step of %d sequences failed", len(chunks))
            outputs = [self._fail(chunk.sequence, f"the model failed: {error}") for chunk in chunks]
        else:
            step_s = time.monotonic() - began_at_s
            outputs = [
                self._apply(chunk, draws, step_s) for chunk, draws in zip(chunks, sampled, strict=True)
            ]
        return StepResult(tuple(outputs), (time.monotonic() - began_at_s) * 1000)

    def snapshot(self) -> EngineLoad:
        available = self._blocks.num_available
        return EngineLoad(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + len(self._scheduler.preempted),
            num_reservations=self._reservations.num_reserved,
            queued_prompt_tokens=sum(
                max(0, s.num_prompt_tokens - s.num_computed_tokens) for s in self._scheduler.living()
            ),
            blocks_total=self.limits.num_blocks,
            blocks_free=available,
            blocks_used=self.limits.num_blocks - available,
            blocks_reserved=self._blocks.count(BlockState.RESERVED),
            blocks_quarantined=self._blocks.count(BlockState.QUARANTINED),
            tokens_prefilled=self._tally.tokens_prefilled,
            tokens_decoded=self._tally.tokens_decoded,
            num_preemptions=self._scheduler.num_preemptions,
            draft_tokens=self._tally.draft_tokens,
            accepted_draft_tokens=self._tally.accepted_draft_tokens,
        )

    def check_integrity(self) -> None:
        """Every block is accounted for, and the tables agree. Raises IntegrityError."""
        tables = [sequence.block_table for sequence in self._living.values()]
        held = [block for table in (*tables, *self._held.values()) for block in table]
        self._blocks.check_integrity(
            {
                BlockState.HELD: [*held, *self._reservations.cached_blocks()],
                BlockState.RESERVED: list(self._reservations.reserved_blocks()),
                BlockState.QUARANTINED: list(self._reservations.quarantined_blocks()),
            }
        )
        self._scheduler.check_integrity()
        scheduled = {sequence.sequence_id for sequence in self._scheduler.living()}
        if scheduled != set(self._living) or self._scheduler.num_living != len(self._living):
            raise IntegrityError(
                f"scheduler and engine disagree on who lives: {scheduled ^ set(self._living)}"
            )

    def _compute(self, chunks: Sequence[Chunk]) -> list[list[Sampled]]:
        """The draws of each chunk, none where it is not the last."""
        if not chunks:
            return []
        num_draws = [chunk.num_draws for chunk in chunks]
        logits = self._runner.run([chunk.row() for chunk in chunks], num_draws, self._watch(chunks))
        rows = [row for chunk in chunks for row in sample_rows(chunk, self.model.eos_token_ids)]
        draws = iter(sample(logits, rows, self._draw))
        return [list(islice(draws, count)) for count in num_draws]

    def _watch(self, chunks: Sequence[Chunk]) -> LayerWatch | None:
        if self._layer_listener is None:
            return None
        return watch_ends(self._layer_listener, chunks, self.layout, self._min_group_bytes)

    def _apply(self, chunk: Chunk, draws: Sequence[Sampled], step_s: float) -> SequenceOutput:
        sequence = chunk.sequence
        if draws and draws[0].token_id is None:
            complaint = None if sequence.matcher is None else sequence.matcher.error
            if complaint is not None:
                return self._fail(sequence, complaint, is_refused=True)
            return self._fail(sequence, "the model gave no finite score")
        is_first = sequence.num_new_tokens == 0
        sequence.prefill_s += step_s if is_first else 0.0
        tokens, reason = take_draws(chunk, draws, self.model.eos_token_ids)
        # The last token is new. Drafts that were wrong lie behind it, and are overwritten.
        sequence.num_computed_tokens = num_computed = chunk.end + max(0, len(tokens) - 1)
        self._scheduler.register_computed(sequence)
        if chunk.drafts:
            self._scheduler.drop_unused(sequence)
        self._tally.note(chunk, tokens, is_first)
        if not tokens:
            return SequenceOutput(sequence.sequence_id, num_computed, (), None, is_last=False)
        if self._speculator is not None:
            self._speculator.note(sequence, (token.token_id for token in tokens))
        sequence.is_recomputing = False
        is_last = reason is not None or sequence.request.until is Until.FIRST_TOKEN
        if is_last:
            self._leave(sequence, SequenceState.FINISHED)
        report = _prefill_report(sequence) if is_first else None
        return SequenceOutput(
            sequence.sequence_id, num_computed, tokens, reason, is_last, report, len(chunk.drafts)
        )

    def _fail(self, sequence: LiveSequence, reason: str, is_refused: bool = False) -> SequenceOutput:
        """What it computed may be spoiled: nobody may find it in the prefix cache."""
        num_computed = sequence.num_computed_tokens
        self._blocks.forget(sequence.block_table)
        self._leave(sequence, SequenceState.FAILED)
        return SequenceOutput(
            sequence.sequence_id, num_computed, (), None, is_last=True, error=reason, is_refused=is_refused
        )

    def _leave(self, sequence: LiveSequence, state: SequenceState) -> None:
        """The one way out."""
        self._scheduler.remove(sequence, state)
        del self._living[sequence.sequence_id]
        if self._speculator is not None:
            self._speculator.forget(sequence.sequence_id)
        if sequence.hold_blocks:
            self._held[sequence.sequence_id] = sequence.block_table
        else:
            self._blocks.release(sequence.block_table)

    def _accept(self, request: SequenceRequest, accepted_at_s: float | None = None) -> LiveSequence:
        now = time.monotonic()
        sequence = LiveSequence(request, self._next_arrival, now if accepted_at_s is None else accepted_at_s)
        self._next_arrival += 1
        self._living[request.sequence_id] = sequence
        return sequence

    def _check(self, request: SequenceRequest) -> None:
        if request.sequence_id in self._living or request.sequence_id in self._held:
            raise ValueError(f"sequence id {request.sequence_id} is in use")
        if not request.prompt_token_ids:
            raise CannotFit("the prompt is empty")
        check_named_ids(self.limits, request)
        known = request.known_token_ids
        check_fits(self.limits, (*request.prompt_token_ids, *known), request.stop.max_tokens - len(known))


def _prefill_report(sequence: LiveSequence) -> PrefillReport:
    here_s = time.monotonic() - sequence.accepted_at_s
    return PrefillReport(
        cached_tokens=sequence.num_cached_tokens or 0,
        queue_ms=max(0.0, here_s - sequence.prefill_s) * 1000,
        prefill_ms=sequence.prefill_s * 1000,
    )
