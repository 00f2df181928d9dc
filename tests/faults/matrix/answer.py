"""One request's answer as its client sees it come: tokens, when each came, and how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise

from pdserve.client import Client, Delta, Finished, PdserveError


class Answer:
    """It is asked for at once."""

    def __init__(
        self, client: Client, request_id: str, prompt: Sequence[int], max_tokens: int, timeout_s: float
    ) -> None:
        self.request_id = request_id
        self.prompt = tuple(prompt)
        self.max_tokens = max_tokens
        self.timeout_s = timeout_s
        self.ids: list[int] = []
        # Monotonic seconds: of each delivery of tokens.
        self.arrivals: list[float] = []
        self.began = time.monotonic()
        self.ended_at: float | None = None
        self.finished: Finished | None = None
        self.error: PdserveError | None = None
        self._changed = asyncio.Condition()
        self._task = asyncio.ensure_future(self._ask(client))

    @property
    def is_cancelled(self) -> bool:
        return self._task.cancelled()

    async def has(self, num_tokens: int, timeout_s: float) -> None:
        """Waits for so many tokens; or for the end, if that comes first."""

        def is_so() -> bool:
            return len(self.ids) >= num_tokens or self.ended_at is not None

        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(is_so), timeout_s)

    def cancel(self) -> None:
        self._task.cancel()

    async def ended(self, grace_s: float) -> bool:
        """Within its deadline and a grace."""
        left = self.began + self.timeout_s + grace_s - time.monotonic()
        done, _ = await asyncio.wait({self._task}, timeout=left)
        return bool(done)

    def longest_pause_s(self, since: float) -> float:
        """From a moment on: between two deliveries, and before the end."""
        end = self.ended_at if self.ended_at is not None else time.monotonic()
        moments = [since, *(each for each in self.arrivals if each > since), max(end, since)]
        return max(later - earlier for earlier, later in pairwise(moments))

    async def _ask(self, client: Client) -> None:
        stream = client.generate_stream(
            self.prompt,
            max_tokens=self.max_tokens,
            temperature=0.9,
            seed=len(self.prompt),
            ignore_eos=True,
            timeout=self.timeout_s,
            request_id=self.request_id,
        )
        try:
            async with aclosing(stream):
                async for event in stream:
                    await self._note(event)
        except PdserveError as error:
            self.error = error
        finally:
            self.ended_at = time.monotonic()
            async with self._changed:
                self._changed.notify_all()

    async def _note(self, event: object) -> None:
        if isinstance(event, Finished):
            self.finished = event
        if isinstance(event, Delta) and event.token_ids:
            self.arrivals.append(time.monotonic())
            async with self._changed:
                self.ids.extend(event.token_ids)
                self._changed.notify_all()
