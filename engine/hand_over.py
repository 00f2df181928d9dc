"""Whether a sequence that begins with its KV computed elsewhere is one that can go on here."""

from __future__ import annotations

from engine.limits import is_known_token
from engine.request import EngineLimits, NewToken, SequenceRequest
from engine.reservations import BlockReservation
from engine.stopping import finish_reason


def check_hand_over(
    request: SequenceRequest,
    reservation: BlockReservation,
    first: NewToken,
    limits: EngineLimits,
    eos_token_ids: frozenset[int],
) -> None:
    """ValueError if the three do not belong together, or `first` is no token here or ends the sequence."""
    name, grammar = request.sequence_id, request.grammar
    num_output = len(request.known_token_ids) + 1
    num_tokens = len(request.prompt_token_ids) + len(request.known_token_ids)
    if reservation.num_tokens != num_tokens or first.position != num_output - 1:
        raise ValueError(f"{name}: reservation, first token and request do not match")
    if not is_known_token(limits, first):
        raise ValueError(f"{name}: its first token is outside the vocabulary")
    is_guided = grammar is not None
    if finish_reason(request.stop, eos_token_ids, first.token_id, num_output, is_guided) is not None:
        raise ValueError(f"{name} ended with its first token")
    if grammar is not None:
        matcher = grammar.begin()
        matcher.append(first.token_id)  # begins anew where others filled the automata
        if matcher.error is not None:
            raise ValueError(f"{name}: its first token is not its grammar's: {matcher.error}")
