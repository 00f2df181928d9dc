"""One sequence while the engine has it.

    WAITING ──▶ RUNNING ⇄ PREEMPTED
       │           │          │
       │           ├──▶ FINISHED        (its reason is in the last output)
       └───────────┴──────────┴──▶ CANCELLED | FAILED

Whatever it needs, it is one case: `num_computed_tokens` catches up with `num_tokens`, and a step that
closes the gap draws the next token. Prompt, known output and drawn output lie in one list.
"""

from __future__ import annotations

from array import array
from enum import Enum

from engine.errors import IntegrityError
from engine.prefix import BlockHash
from engine.request import SequenceRequest, Until
from engine.seen_tokens import SeenTokens


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_ENDS = {SequenceState.CANCELLED, SequenceState.FAILED}
_MOVES: dict[SequenceState, set[SequenceState]] = {
    SequenceState.WAITING: {SequenceState.RUNNING} | _ENDS,
    SequenceState.RUNNING: {SequenceState.PREEMPTED, SequenceState.FINISHED} | _ENDS,
    SequenceState.PREEMPTED: {SequenceState.RUNNING} | _ENDS,
    SequenceState.FINISHED: set(),
    SequenceState.CANCELLED: set(),
    SequenceState.FAILED: set(),
}


class Sequence:
    def __init__(self, request: SequenceRequest, arrival: int, accepted_at_s: float) -> None:
        self.request = request
        self.sequence_id = request.sequence_id
        self.arrival = arrival  # counts up: the youngest has the largest
        self.state = SequenceState.WAITING
        self.token_ids = [*request.prompt_token_ids, *request.known_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.max_kv_tokens = _max_kv_tokens(request)
        self.block_table = array("i")
        self.block_hashes: list[BlockHash] = []  # names of its first full blocks, as far as anybody asked
        self.num_registered_blocks = 0
        # Nothing but the best token is asked for, once min_tokens are there.
        self.is_plain = request.sampling.is_plain and request.grammar is None
        # Knows all output. It outlives preemption: nothing of it is computed with the model.
        self.matcher = None if request.grammar is None else request.grammar.begin()
        self.hold_blocks = request.hold_blocks
        self.is_growing = False  # runs, and may take more blocks than it has: kept by the scheduler
        self.is_recomputing = False  # preempted once, and not caught up since
        self.num_cached_tokens: int | None = None  # prompt tokens found in the cache at its first start
        self.num_likely_hits = 0  # tokens that the cache had when it came, where the order asks for them
        self.accepted_at_s = accepted_at_s
        self.prefill_s = 0.0  # of steps that computed some of it, until its first new token
        self._seen: SeenTokens | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens that joined here; the one an add_computed brings counts."""
        return self.num_output_tokens - len(self.request.known_token_ids)

    @property
    def num_missing_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def seen(self) -> SeenTokens | None:
        """What penalties ask; None if it has none."""
        params = self.request.sampling
        if self._seen is None and params.has_penalties:
            prompt = self.request.prompt_token_ids if params.repetition_penalty != 1.0 else ()
            self._seen = SeenTokens(prompt, self.token_ids[self.num_prompt_tokens :])
        return self._seen

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self._seen is not None:
            self._seen.add(token_id)
        if self.matcher is not None:
            self.matcher.append(token_id)

    def move(self, state: SequenceState) -> None:
        if state not in _MOVES[self.state]:
            raise IntegrityError(f"{self.sequence_id}: {self.state.value} → {state.value} is no legal move")
        self.state = state


def _max_kv_tokens(request: SequenceRequest) -> int:
    """The most tokens whose K and V this engine will ever store for it: the last one drawn needs none."""
    num_prompt_tokens = len(request.prompt_token_ids)
    if request.until is Until.FIRST_TOKEN:
        return num_prompt_tokens + len(request.known_token_ids)
    return num_prompt_tokens + request.stop.max_tokens - 1
