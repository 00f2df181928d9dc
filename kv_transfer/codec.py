"""Frames to bytes and back. A header is a msgpack array [kind, transfer_id, epoch, fields...]: nothing in it
can name code, and there is no pickle. `decode` raises FrameError on anything else than a well-formed frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgpack
import numpy as np

from engine.request import NewToken
from engine.sampling import PositionLogprobs, TokenLogprob
from kv_transfer.frame import (
    MAX_FRAME_BYTES,
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
from kv_transfer.verify import Buffer, Verify

# The block ids of a sequence of four million tokens are the longest that is in one.
MAX_HEADER_BYTES = 1024 * 1024
PREFIX_BYTES = 4
_MAX_TEXT = 4096
_MAX_LOGPROBS = 256
_BLOCK_ID = np.dtype("<u4")


class FrameError(ValueError):
    """These bytes are no frame. The stream that carried them cannot be trusted any further."""


def max_message_bytes(block_bytes: int) -> int:
    """What both ends of a wire must let pass."""
    return max(MAX_FRAME_BYTES, block_bytes) + MAX_HEADER_BYTES + PREFIX_BYTES


def encode(header: Header, payload: Sequence[Buffer] = ()) -> bytes:
    packed: bytes = msgpack.packb([header.kind, header.key.transfer_id, header.key.epoch, *_pack(header)])
    if len(packed) > MAX_HEADER_BYTES:
        raise FrameError(f"a header of {len(packed)} bytes; {MAX_HEADER_BYTES} are allowed")
    return b"".join((len(packed).to_bytes(PREFIX_BYTES, "little"), packed, *payload))


def decode(raw: bytes) -> tuple[Header, memoryview]:
    """The header and the payload (a view into `raw`). Raises FrameError."""
    header, payload = _take_header(memoryview(raw))
    if len(payload) > 0 and not isinstance(header, Blocks):
        raise FrameError(f"{len(payload)} bytes of payload behind {type(header).__name__}")
    return header, payload


def decode_answers(raw: bytes) -> list[Ack | Refused]:
    """What D says: answers without payload, one behind the other, at least one. Raises FrameError."""
    answers: list[Ack | Refused] = []
    rest = memoryview(raw)
    while rest or not answers:
        header, rest = _take_header(rest)
        if not isinstance(header, Ack | Refused):
            raise FrameError(f"{type(header).__name__} came from the wrong side")
        answers.append(header)
    return answers


def _take_header(view: memoryview) -> tuple[Header, memoryview]:
    """And what is behind it."""
    length = int.from_bytes(view[:PREFIX_BYTES], "little")
    end = PREFIX_BYTES + length
    if len(view) < PREFIX_BYTES or not 0 < length <= MAX_HEADER_BYTES or end > len(view):
        raise FrameError(f"a header of {length} bytes in a frame of {len(view)}")
    return _parse(view[PREFIX_BYTES:end]), view[end:]


def _pack(header: Header) -> list[object]:
    if isinstance(header, Open):
        shape = header.layout
        layout = [shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.block_size, shape.dtype]
        return [
            header.instance_id,
            header.transport,
            [*layout, shape.model_fingerprint],
            header.num_blocks,
            header.num_cached_blocks,
            int(header.verify),
            int(header.is_remote_writer),
        ]
    if isinstance(header, Blocks):
        span = [header.first_block, header.num_blocks, header.first_layer, header.num_layers]
        return [header.seq, *span, header.checksum]
    if isinstance(header, Commit):
        first = _pack_token(header.first)
        return [header.seq, header.num_blocks, header.digest, first, header.sampled_at_unix_ns]
    if isinstance(header, Renew):
        return [header.seq]
    if isinstance(header, Ack):
        return [header.seq, np.array(header.block_ids, _BLOCK_ID).tobytes()]
    if isinstance(header, Abort):
        return [header.reason[:_MAX_TEXT]]
    if isinstance(header, Refused):
        return [header.seq, header.code, header.reason[:_MAX_TEXT], header.message[:_MAX_TEXT]]
    return []


def _pack_token(token: NewToken) -> list[object]:
    if token.logprobs is None:
        return [token.position, token.token_id, []]
    pairs = (token.logprobs.chosen, *token.logprobs.top)
    return [token.position, token.token_id, [[p.token_id, p.logprob] for p in pairs]]


def _parse(packed: memoryview) -> Header:
    try:
        values = msgpack.unpackb(packed, raw=False, max_array_len=_MAX_LOGPROBS, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError) as error:  # msgpack's own errors are ValueErrors
        raise FrameError(f"not a msgpack header: {error}") from error
    fields = _Fields(values)
    kind = fields.uint(8)
    header = _parse_kind(kind, TransferKey(fields.text(), fields.uint(32)), fields)
    fields.end()
    return header


def _parse_kind(kind: int, key: TransferKey, fields: _Fields) -> Header:
    if kind == Blocks.kind:
        seq, first_block, num_blocks, first_layer, num_layers = (fields.uint(32) for _ in range(5))
        return Blocks(key, seq, first_block, num_blocks, first_layer, num_layers, fields.uint(64))
    if kind == Ack.kind:
        return Ack(key, fields.uint(32), fields.block_ids())
    if kind == Open.kind:
        return _parse_open(key, fields)
    if kind == Commit.kind:
        seq, num_blocks, digest = fields.uint(32), fields.uint(32), fields.uint(64)
        return Commit(key, seq, num_blocks, digest, _parse_token(fields.items()), fields.uint(64))
    if kind == Renew.kind:
        return Renew(key, fields.uint(32))
    if kind == Abort.kind:
        return Abort(key, fields.text())
    if kind == Closed.kind:
        return Closed(key)
    if kind == Refused.kind:
        return Refused(key, fields.uint(32), fields.uint(8), fields.text(), fields.text())
    raise FrameError(f"unknown kind {kind}")


def _parse_open(key: TransferKey, fields: _Fields) -> Open:
    instance_id, transport, layout = fields.text(), fields.text(), _parse_layout(fields.items())
    num_blocks, num_cached_blocks = fields.uint(32), fields.uint(32)
    verify, is_remote_writer = fields.uint(8), fields.uint(1)
    if verify > max(Verify):
        raise FrameError(f"unknown mode of verification {verify}")
    shape = (num_blocks, num_cached_blocks)
    return Open(key, instance_id, transport, layout, *shape, Verify(verify), bool(is_remote_writer))


def _parse_layout(fields: _Fields) -> KVLayout:
    num_layers, num_kv_heads, head_dim, block_size = (fields.uint(32) for _ in range(4))
    layout = KVLayout(num_layers, num_kv_heads, head_dim, block_size, fields.text(), fields.text())
    fields.end()
    return layout


def _parse_token(fields: _Fields) -> NewToken:
    position, token_id, pairs = fields.uint(32), fields.uint(32), fields.items()
    fields.end()
    logprobs = [_parse_logprob(pair) for pair in pairs.each()]
    if not logprobs:
        return NewToken(position, token_id, None)
    return NewToken(position, token_id, PositionLogprobs(logprobs[0], tuple(logprobs[1:])))


def _parse_logprob(fields: _Fields) -> TokenLogprob:
    pair = TokenLogprob(fields.uint(32), fields.real())
    fields.end()
    return pair


class _Fields:
    """Takes typed values off an array, one after the other."""

    def __init__(self, values: object) -> None:
        if not isinstance(values, list):
            raise FrameError(f"an array was due, not {type(values).__name__}")
        self._values: list[object] = values[::-1]

    def _next(self) -> object:
        if not self._values:
            raise FrameError("the header ends early")
        return self._values.pop()

    def uint(self, bits: int) -> int:
        value = self._next()
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << bits:
            raise FrameError(f"an unsigned number of {bits} bits was due")
        return value

    def real(self) -> float:
        value = self._next()
        if not isinstance(value, float) or math.isnan(value):
            raise FrameError("a number was due")
        return value

    def text(self) -> str:
        value = self._next()
        if not isinstance(value, str) or len(value) > _MAX_TEXT:
            raise FrameError(f"a text of at most {_MAX_TEXT} characters was due")
        return value

    def block_ids(self) -> tuple[int, ...]:
        value = self._next()
        if not isinstance(value, bytes) or len(value) % _BLOCK_ID.itemsize:
            raise FrameError("block ids were due")
        return tuple(np.frombuffer(value, _BLOCK_ID).tolist())

    def items(self) -> _Fields:
        return _Fields(self._next())

    def each(self) -> list[_Fields]:
        return [self.items() for _ in range(len(self._values))]

    def end(self) -> None:
        if self._values:
            raise FrameError(f"{len(self._values)} fields too many")
