"""Load over HTTP, on any server that speaks OpenAI's API, by `completions` or `chat/completions`."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from typing_extensions import Self

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.client import Answer, RequestFailed, Sampling, Served
from pdserve.bench.serve.endpoint import Api, Endpoint
from pdserve.bench.serve.sse import Heard, parse
from pdserve.bench.serve.workload import PlannedRequest

_SERVED_TIMEOUT_S = 20.0
_MAX_MESSAGE = 300
_LOOPBACK = re.compile(r"https?://(127\.[\d.]+|localhost|\[::1\])([:/]|$)")


class HttpClient:
    """`timeout_s` is each request's limit; None: there is none. As many connections as there are requests.

    Where the endpoint names no model, `served` comes before the first `send`.
    """

    def __init__(
        self, endpoint: Endpoint, sampling: Sampling | None = None, timeout_s: float | None = None
    ) -> None:
        self._endpoint = endpoint
        self._sampling = sampling or Sampling()
        total_s = None if timeout_s == math.inf else timeout_s
        self._timeout = aiohttp.ClientTimeout(total=total_s, connect=None, sock_connect=30.0)
        self._model = endpoint.model
        self._session: aiohttp.ClientSession | None = None
        self._tls = endpoint.tls() if endpoint.url.startswith("https") else True

    async def __aenter__(self) -> Self:
        key = self._endpoint.api_key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=self._timeout,
            # Not `trust_env`: that takes the passwords in ~/.netrc along, and none goes with a key.
            proxy=_proxy(self._endpoint.url),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def served(self) -> Served:
        url = f"{self._endpoint.base}/models"
        timeout = aiohttp.ClientTimeout(total=_SERVED_TIMEOUT_S)
        try:
            async with self._open().get(url, timeout=timeout) as response:
                if response.status in (404, 405) and self._model is not None:
                    return Served(self._model, None, None)  # not every server lists its models
                if response.status != 200:
                    raise BenchError(f"{url} answers {response.status}: {await _error_text(response)}")
                cards = (await response.json(content_type=None))["data"]
            by_id = {str(card["id"]): card for card in cards}
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise BenchError(f"no server answers at {url}: {error or 'timeout'}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{url} does not answer with a list of models") from error
        if not by_id:
            raise BenchError(f"{url} lists no model")
        self._model = self._model or next(iter(by_id))
        # What is not listed may be served all the same (an alias, an adapter).
        card = by_id.get(self._model, {})
        return Served(self._model, _count(card.get("max_model_len")), _count(card.get("vocab_size")))

    async def send(self, request: PlannedRequest, on_tokens: Callable[[], None]) -> Answer:
        try:
            async with self._open().post(
                self._endpoint.path, data=self._body(request), headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    raise RequestFailed(str(response.status), await _error_text(response))
                heard = Heard(on_tokens)
                async for line in _lines(response.content):
                    parse(line, heard)
                return heard.answer()
        # First: a connection that was not made in time is both.
        except aiohttp.ClientError as error:
            raise RequestFailed("CONNECTION", str(error) or type(error).__name__) from error
        except asyncio.TimeoutError as error:
            raise RequestFailed("TIMEOUT", f"not done within {self._timeout.total} s") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise BenchError("the client is not open: use `async with`")
        return self._session

    def _body(self, request: PlannedRequest) -> bytes:
        if self._model is None:
            raise BenchError("which model? name it, or ask `served` first")
        fields: dict[str, object] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": self._sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._sampling.ignore_eos:
            fields["ignore_eos"] = True
        if self._endpoint.api is Api.COMPLETIONS:
            fields["prompt"] = request.prompt
        elif isinstance(request.prompt, str):
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            raise BenchError("a chat takes text, and this workload's prompts are token ids")
        return json.dumps(fields | dict(self._endpoint.extra), separators=(",", ":")).encode()


def _proxy(url: str) -> str | None:
    """The environment's is for the world outside, and this machine is none of it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None  # told when it is asked
    if _LOOPBACK.match(url) or proxy_bypass(parts.hostname or ""):
        return None
    return getproxies().get(parts.scheme)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Whole lines, as soon as they are there."""
    rest = b""
    async for block in content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line
    yield rest


async def _error_text(response: aiohttp.ClientResponse) -> str:
    text = (await response.content.read(65536)).decode(errors="replace")
    try:
        body = json.loads(text)
        error = body.get("error", body)
        text = str(error.get("message", text) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass  # no JSON, or none of OpenAI's shape: its own words
    return text[:_MAX_MESSAGE] or (response.reason or "no words")


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None
