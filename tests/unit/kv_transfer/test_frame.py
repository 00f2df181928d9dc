from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import NewToken
from engine.sampling import PositionLogprobs, TokenLogprob
from kv_transfer.codec import FrameError, decode, encode
from kv_transfer.frame import (
    Abort,
    Ack,
    Blocks,
    Closed,
    Commit,
    Header,
    Open,
    Refused,
    Renew,
    TransferKey,
)
from kv_transfer.layout import KVLayout
from kv_transfer.verify import Digest, Verify, checksum

KEY = TransferKey("6c9f0c1e-odd/ÿ漢", 3)
LAYOUT = KVLayout(30, 3, 64, 16, "bfloat16", "print")
LOGPROBS = PositionLogprobs(TokenLogprob(5, -0.5), (TokenLogprob(5, -0.5), TokenLogprob(6, float("-inf"))))
HEADERS: list[Header] = [
    Open(KEY, "instance", "grpc", LAYOUT, 9, 2, Verify.CHECKSUM),
    Open(KEY, "instance", "shm", LAYOUT, 9, 2, Verify.FULL, is_remote_writer=True),
    Blocks(KEY, 4, 2, 3, 10, 5, 2**64 - 1),
    Commit(KEY, 5, 9, 17, NewToken(2, 49151, None), 1_700_000_000_000_000_000),
    Commit(KEY, 5, 9, 17, NewToken(2, 5, LOGPROBS), 0),
    Renew(KEY, 3),
    Abort(KEY, "the client went away"),
    Closed(KEY),
    Ack(KEY, 7),
    Ack(KEY, 0, (0, 17, 2**32 - 1)),
    Refused(KEY, 7, 15, "KV_CHECKSUM", "frame 7 arrived damaged"),
]
BLOCKS = next(header for header in HEADERS if isinstance(header, Blocks))


@pytest.mark.parametrize("header", HEADERS, ids=lambda h: type(h).__name__)
def test_a_header_comes_back_as_it_was(header: Header) -> None:
    decoded, payload = decode(encode(header))
    assert decoded == header
    assert len(payload) == 0


def test_the_payload_is_a_view_of_all_pieces_in_order() -> None:
    header, payload = decode(encode(BLOCKS, [b"ab", memoryview(b"cd"), bytearray(b"e")]))
    assert header == BLOCKS
    assert bytes(payload) == b"abcde"


def test_only_blocks_carry_a_payload() -> None:
    with pytest.raises(FrameError, match="payload behind Ack"):
        decode(encode(Ack(KEY, 1), [b"x"]))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_frame_error(raw: bytes) -> None:
    decode_or_refuse(raw)


@given(st.sampled_from(HEADERS), st.integers(0, 400), st.integers(0, 255))
def test_any_changed_byte_gives_a_frame_or_a_frame_error(header: Header, where: int, value: int) -> None:
    raw = bytearray(encode(header))
    raw[where % len(raw)] = value
    decode_or_refuse(bytes(raw))


@given(st.sampled_from(HEADERS), st.integers(0, 400))
def test_every_cut_frame_is_refused(header: Header, length: int) -> None:
    raw = encode(header)
    with pytest.raises(FrameError):
        decode(raw[: length % len(raw)])


JSON_LIKE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=5),
        st.binary(max_size=5),
    ),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(st.integers(0, 10), st.lists(JSON_LIKE, max_size=8))
def test_any_msgpack_value_is_a_header_or_a_frame_error(kind: int, fields: list[object]) -> None:
    packed = msgpack.packb([kind, *fields])
    decode_or_refuse(len(packed).to_bytes(4, "little") + packed)


def test_deep_nesting_and_foreign_types_are_refused() -> None:
    foreign = (msgpack.ExtType(1, b"x"), {"a": 1})
    for packed in (b"\x91" * 5000 + b"\x90", *map(msgpack.packb, foreign)):
        with pytest.raises(FrameError):
            decode(len(packed).to_bytes(4, "little") + packed)


def test_a_header_that_claims_gigabytes_is_refused() -> None:
    with pytest.raises(FrameError):
        decode(b"\xff\xff\xff\xff" + b"\x00" * 100)


def test_the_digest_depends_on_the_order_of_the_frames() -> None:
    ab, ba = Digest(), Digest()
    for value in (1, 2):
        ab.add(value)
    for value in (2, 1):
        ba.add(value)
    assert ab.value() != ba.value()


def test_the_checksum_does_not_see_how_the_payload_was_cut() -> None:
    assert checksum([b"abcdef"]) == checksum([b"ab", memoryview(b"cdef")])


def decode_or_refuse(raw: bytes) -> None:
    try:
        header, payload = decode(raw)
    except FrameError:
        return
    assert decode(encode(header, [payload]))[0] == header
