"""A real browser without a screen, spoken to by the DevTools protocol: Debian's `chromium`."""

from __future__ import annotations

import asyncio
import base64
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

_TIMEOUT_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session = ""
        self._last_id = 0
        # What the page complained of: uncaught errors, and errors on its console.
        self.complaints: list[str] = []

    async def call(self, method: str, **params: object) -> dict:  # type: ignore[type-arg]
        """Of a shape that the caller knows."""
        self._last_id += 1
        message: dict[str, object] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        while True:
            answer = await self._socket.receive_json(timeout=_TIMEOUT_S)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict) -> None:  # type: ignore[type-arg]
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.complaints.append(str(event["params"]["entry"]))

    async def open(self, url: str, width: int, height: int) -> None:
        target = await self.call(
            "Target.createTarget", url="about:blank", newWindow=True, width=width, height=height
        )
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def value(self, expression: str) -> object:
        """Of JavaScript; a promise's is awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await self.value(expression):
            if asyncio.get_running_loop().time() > deadline:
                text = await self.value("document.body.innerText")
                raise AssertionError(f"did not come true: {expression}\n{text}\n{self.complaints}")
            await asyncio.sleep(0.05)

    async def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def browsing(url: str, *, width: int = 1200, height: int = 900) -> AsyncIterator[Page]:
    """A browser of its own with this page open."""
    browser = find_browser()
    assert browser is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            browser,
            *_FLAGS,
            f"--user-data-dir={Path(profile)}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            address = await asyncio.wait_for(_devtools(process), _TIMEOUT_S)
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(address, max_msg_size=0) as socket,
            ):
                page = Page(socket)
                await page.open(url, width, height)
                yield page
        finally:
            process.kill()
            await process.wait()


async def _devtools(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async for line in process.stderr:
        _, said, address = line.decode(errors="replace").partition("DevTools listening on ")
        if said:
            return address.strip()
    raise AssertionError("the browser ended at once")
