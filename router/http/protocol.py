"""A connection of bounded cost: bytes in a request's head, time to send it, answers that nobody reads."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_CONNECTIONS = 1024
MAX_HEAD_BYTES = 1 << 16
# Chunks of one byte have six around it.
_MAX_FRAMING_RATIO = 8
# Requests on a connection behind the one that is answered; while there are more, nothing is read from it.
_MAX_PIPELINED = 16
# From a connection, or a request's first byte, to the end of the request's head.
HEAD_TIMEOUT_S = 30.0
# For the rest of a body that was answered already, and of an answer behind which the connection closes.
_LINGER_S = 30.0
# A client that takes nothing for so long is gone.
_STALL_S = 300.0
# What an answer that is whole and waits may take on top of both: a large one goes over a slow line, too.
_SLOWEST_BYTES_S = 1 << 14
# The key in a request's state of what closes its connection at once, whatever was not sent yet.
ABORT = "abort"


class _TooLarge(Exception):
    pass


class BoundedProtocol(HttpToolsProtocol):
    # Bytes of the message at hand besides its body, but for those that came with its first ones.
    _num_fed = 0
    _num_body = 0
    _num_head = 0
    _is_new = False
    _is_whole = True
    _is_refused = False
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    # The request that is answered; `cycle` is the last one that has come.
    _answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"at most {MAX_CONNECTIONS} connections are taken")
        else:
            self._expect(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        _cancel(self._writing)
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._is_new = False
        self._unset_keepalive_if_required()
        self._parse(data)
        if not self._is_new:
            self._num_fed += len(data)
        if self._num_fed - (1 + _MAX_FRAMING_RATIO) * self._num_body > MAX_HEAD_BYTES:
            self._refuse_head()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as found:
            self._go_on_as_before(data[found.args[0] :])
        except httptools.HttpParserError:
            self._refuse_garbage()

    def _go_on_as_before(self, rest: bytes) -> None:
        """Who offers another protocol (Java's client does, in every first request) is answered in this one.
        The parser takes what follows for the other's, so a new one reads the request again, without it."""
        if not self._is_offer():
            self._refuse_garbage()
            return
        first = (self.parser.get_method(), self.url, b"HTTP/" + self.parser.get_http_version().encode())
        fields = [b": ".join(field) for field in self.headers if field[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._parse(b"\r\n".join((b" ".join(first), *fields, b"", rest)))

    def _refuse_garbage(self) -> None:
        self.logger.warning("Invalid HTTP request received.")
        self.send_400_response("Invalid HTTP request received.")

    def _is_offer(self) -> bool:
        """Whether the request at hand comes again: a CONNECT is none, and would come for ever."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_fed = self._num_body = self._num_head = 0
        self._is_new, self._is_whole = True, False
        self.scope["state"][ABORT] = self.transport.abort
        self._expect(HEAD_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_offer():
            return
        self._expect(None)
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _MAX_PIPELINED:
            # Who does not read does not hear that the client is gone, either.
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_offer():
            return
        self._is_whole = True
        self._expect(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_whole or self.transport.is_closing():
            self._expect(_LINGER_S + self._time_of_the_rest_s())

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect(_LINGER_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        _cancel(self._writing)
        self._writing = self.loop.call_later(_STALL_S + self._time_of_the_rest_s(), self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._writing)

    def _time_of_the_rest_s(self) -> float:
        return self.transport.get_write_buffer_size() / _SLOWEST_BYTES_S

    def _expect(self, seconds: float | None) -> None:
        """That the client goes on within so long. None: it owes nothing."""
        _cancel(self._reading)
        if seconds is not None:
            self._reading = self.loop.call_later(seconds, self.transport.abort)

    def _count_head(self, num_bytes: int) -> None:
        self._num_head += num_bytes
        if self._num_head > MAX_HEAD_BYTES:
            self._refuse_head()
            # Ends the parser, too.
            raise _TooLarge

    def _refuse_head(self) -> None:
        message = f"the head is too large: at most {MAX_HEAD_BYTES} bytes are taken"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        if self._is_refused:
            return
        self._is_refused = True
        kind = "invalid_request_error" if status < 500 else "server_error"
        code = status.phrase.lower().replace(" ", "_")
        error = {"message": message, "type": kind, "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
