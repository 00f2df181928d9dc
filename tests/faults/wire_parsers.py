"""Every parser of bytes that come from outside a process: what it may raise, and messages to begin from."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from pydantic import ValidationError

from kv_transfer.codec import FrameError, decode, decode_answers, encode
from kv_transfer.frame import Ack, Refused
from kv_transfer.frame_socket import FrameSocket, framed
from kv_transfer.transport import pair_messages
from kv_transfer.transport.pair_messages import Hello, Kind, Meeting
from observability.origin import read_trace
from pdserve.v1 import generation_pb2, worker_pb2
from pdserve.v1.errors import InvalidArgument, NotFound, Unimplemented
from router.front.checks import RequestBounds, check_request, resolve_max_tokens
from router.http.calls import chat_call, completion_call
from router.http.requests import ChatCompletionRequest, CompletionRequest
from tests.unit.kv_transfer.test_frame import HEADERS, KEY
from worker.messages import push_target, sequence_request

BOUNDS = RequestBounds("tiny", vocab_size=512, eos_token_ids=frozenset({508}), max_prompt_bytes=1000, max_n=4)
_REFUSED_REQUEST = (InvalidArgument, NotFound, Unimplemented)


@dataclass(frozen=True, slots=True)
class Parser:
    name: str
    parse: Callable[[bytes], object]
    # What says "this is no good message".
    refusals: tuple[type[Exception], ...]
    # Good messages, to be spoilt.
    seeds: Sequence[bytes]


def _pair(raw: bytes) -> None:
    kind, body = pair_messages.parse(raw)
    if kind is Kind.PAIR:
        pair_messages.parse_hello(body)
    elif kind is Kind.MEET:
        pair_messages.parse_meeting(body)
    elif kind is Kind.POSTED:
        pair_messages.parse_posted(body)
    elif kind is Kind.FRAME:
        decode(body)


def _socket(raw: bytes) -> None:
    """What comes of bytes on a Unix socket, however many messages they are."""
    sends, receives = socket.socketpair()
    with sends, receives:
        sends.sendall(raw)
        sends.shutdown(socket.SHUT_WR)
        frames = FrameSocket(receives, send_timeout_s=1.0)
        while (message := frames.receive()) is not None:
            if message:
                decode(message)


def _generate(raw: bytes) -> None:
    message = generation_pb2.GenerateRequest.FromString(raw)
    check_request(message, BOUNDS)
    resolve_max_tokens(message.stop, 10, 100)


def _reserve(raw: bytes) -> None:
    sequence_request(worker_pb2.ReserveRequest.FromString(raw).sequence)


def _prefill(raw: bytes) -> None:
    message = worker_pb2.PrefillRequest.FromString(raw)
    sequence_request(message.sequence)
    push_target(message.reservation)


def _completion(raw: bytes) -> None:
    for message in completion_call(CompletionRequest.model_validate_json(raw), "r").messages:
        check_request(message, BOUNDS)


def _chat(raw: bytes) -> None:
    for message in chat_call(ChatCompletionRequest.model_validate_json(raw), "r").messages:
        check_request(message, BOUNDS)


def _trace(raw: bytes) -> None:
    read_trace(raw.decode("latin-1"), [raw.decode("latin-1")])


_SAMPLING = generation_pb2.SamplingParams(temperature=0.5, top_k=3, seed=2**63, logit_bias={3: -1.5})
_STOP = generation_pb2.StopConditions(max_tokens=8, min_tokens=2, stop=["a", "漢"], stop_token_ids=[4, 5])
_OUTPUT = generation_pb2.OutputOptions(logprobs=3)
_SPEC = worker_pb2.SequenceSpec(
    transfer_id="6c9f",
    epoch=3,
    prompt_token_ids=[1, 2, 3],
    known_token_ids=[4],
    sampling=_SAMPLING,
    stop=_STOP,
)
_RESERVATION = worker_pb2.Reservation(
    transfer_id="6c9f",
    epoch=3,
    instance_id="i",
    num_blocks=3,
    lease_ms=1000,
    ways=[worker_pb2.Way(transport="grpc")],
)
_GENERATES = [
    generation_pb2.GenerateRequest(text="hello", sampling=_SAMPLING, stop=_STOP, output=_OUTPUT, n=2),
    generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[0, 511]), request_id="mine"),
    generation_pb2.GenerateRequest(
        chat=generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    ),
]
_FIELDS = {
    "temperature": 0.5,
    "top_k": 3,
    "seed": 9,
    "stop": ["a", "b"],
    "logit_bias": {"3": -100},
    "max_tokens": 8,
    "n": 2,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_object"},
    "ignore_eos": True,
    "stream": True,
}
_COMPLETIONS = [{"prompt": "x"}, {"prompt": [[1, 2], [3]], **_FIELDS}, {"prompt": ["a", "b"], "logprobs": 2}]
_CHATS = [
    {"messages": [{"role": "user", "content": "hi"}]},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "logprobs": True,
        **_FIELDS,
    },
]
_FRAMES = [encode(header) for header in HEADERS] + [encode(HEADERS[2], [b"payload"])]
_ANSWERS = [encode(Ack(KEY, 7)), encode(Ack(KEY, 0, (0, 17))), encode(Refused(KEY, 7, 15, "KV", "damaged"))]
_PAIRS = [
    pair_messages.message(Kind.PAIR, Hello("gloo", 4096).pack()),
    pair_messages.message(Kind.MEET, Meeting(5000, bytes(16)).pack()),
    pair_messages.message(Kind.POSTED, pair_messages.pack_posted([3, 4])),
    pair_messages.message(Kind.BROKEN, b"why"),
    *(pair_messages.message(Kind.FRAME, frame) for frame in _FRAMES[:4]),
]
_TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def _json(bodies: Sequence[object]) -> list[bytes]:
    return [json.dumps(body).encode() for body in bodies]


_OF_HTTP = (ValidationError, *_REFUSED_REQUEST)
_OF_WORKERS = (DecodeError, InvalidArgument)
PARSERS = [
    Parser("frame", decode, (FrameError,), _FRAMES),
    Parser("answers", decode_answers, (FrameError,), _ANSWERS),
    Parser("pair message", _pair, (FrameError,), _PAIRS),
    Parser("frame socket", _socket, (FrameError,), [framed(frame) for frame in _FRAMES]),
    Parser(
        "Generate",
        _generate,
        (DecodeError, *_REFUSED_REQUEST),
        [each.SerializeToString() for each in _GENERATES],
    ),
    Parser("Reserve", _reserve, _OF_WORKERS, [worker_pb2.ReserveRequest(sequence=_SPEC).SerializeToString()]),
    Parser(
        "Prefill",
        _prefill,
        _OF_WORKERS,
        [worker_pb2.PrefillRequest(sequence=_SPEC, reservation=_RESERVATION).SerializeToString()],
    ),
    Parser("completion", _completion, _OF_HTTP, _json(_COMPLETIONS)),
    Parser("chat", _chat, _OF_HTTP, _json(_CHATS)),
    Parser("traceparent", _trace, (), [_TRACE, _TRACE + b"-more"]),
]
