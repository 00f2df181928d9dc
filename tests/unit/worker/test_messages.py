from __future__ import annotations

import pytest

from engine.request import NewToken, PrefillReport, Until
from engine.sampling import FinishReason, PositionLogprobs, TokenLogprob
from kv_transfer.frame import TransferKey
from kv_transfer.transfer import PushTarget
from kv_transfer.ways import Way
from pdserve.v1 import generation_pb2, worker_pb2
from pdserve.v1.errors import InvalidArgument
from worker.messages import push_target, reservation_message, sequence_request, token_output

KEY = TransferKey("t", 3)
WAYS = (Way("grpc", "127.0.0.1:1"),)


def spec() -> worker_pb2.SequenceSpec:
    made = worker_pb2.SequenceSpec(transfer_id="t", epoch=3, prompt_token_ids=[1, 2], known_token_ids=[3])
    made.sampling.seed = 2**64 - 1
    made.stop.max_tokens = 5
    return made


def test_what_is_absent_gets_the_defaults_of_the_proto() -> None:
    request = sequence_request(spec())
    assert request.sequence_id == "t/3"
    assert (request.prompt_token_ids, request.known_token_ids) == ((1, 2), (3,))
    assert request.until is Until.FINISH
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)
    assert (sampling.top_k, sampling.num_logprobs, sampling.seed) == (None, None, 2**64 - 1)


def test_an_explicit_zero_is_not_a_default() -> None:
    made = spec()
    made.sampling.temperature = 0.0
    made.output.logprobs = 0
    made.sampling.logit_bias[7] = -1.0
    made.sampling.logit_bias[2] = 1.0
    request = sequence_request(made, Until.FIRST_TOKEN, hold_blocks=True)
    assert request.sampling.is_greedy
    assert request.sampling.num_logprobs == 0
    assert request.sampling.logit_bias == ((2, 1.0), (7, -1.0))
    assert request.hold_blocks


@pytest.mark.parametrize("length", [0, 65])
def test_a_transfer_id_has_a_bounded_length(length: int) -> None:
    made = spec()
    made.transfer_id = "x" * length
    with pytest.raises(InvalidArgument):
        sequence_request(made)


def test_the_longest_transfer_ids_name_sequences_of_their_own() -> None:
    """A sequence is known by its key's name, and long names are cut."""
    names = set()
    for end in "ab":
        made = spec()
        made.transfer_id = "x" * 63 + end
        names.add(sequence_request(made).sequence_id)
    assert len(names) == 2


def test_a_reservation_comes_back_as_it_was() -> None:
    target = PushTarget(KEY, "instance", (Way("shm", "/s", b"n"), *WAYS), 2, 5, 1.5)
    assert push_target(reservation_message(target)) == target


def test_a_reservation_that_contradicts_itself_is_invalid() -> None:
    for spoiled in (
        PushTarget(KEY, "i", WAYS, 6, 5, 1.0),
        PushTarget(KEY, "i", WAYS, 2, 5, 0.0),
        PushTarget(KEY, "i", (), 2, 5, 1.0),
    ):
        with pytest.raises(InvalidArgument):
            push_target(reservation_message(spoiled))


def test_a_token_carries_all_that_is_known_of_it() -> None:
    logprobs = PositionLogprobs(TokenLogprob(9, -0.5), (TokenLogprob(9, -0.5), TokenLogprob(4, -1.5)))
    message = token_output(KEY, NewToken(6, 9, logprobs), FinishReason.STOP, PrefillReport(16, 1.0, 2.0))
    assert (message.transfer_id, message.epoch, message.position, message.token_id) == ("t", 3, 6, 9)
    assert message.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert [pair.token_id for pair in message.logprobs.top] == [9, 4]
    assert (message.prefill.cached_tokens, message.prefill.prefill_ms) == (16, 2.0)
    drafted = token_output(KEY, NewToken(6, 9, None, was_drafted=True), num_drafts=5)
    assert (drafted.was_drafted, drafted.num_drafts) == (True, 5)
    bare = token_output(KEY, NewToken(0, 9, None))
    assert (bare.was_drafted, bare.num_drafts) == (False, 0)
    assert not bare.HasField("logprobs")
    assert not bare.HasField("prefill")
    assert bare.finish_reason == generation_pb2.FINISH_REASON_UNSPECIFIED
