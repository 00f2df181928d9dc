"""What the client refuses by itself."""

from __future__ import annotations

import math

import pytest

from pdserve import Client
from pdserve.v1.errors import InvalidArgument


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e20])
async def test_a_time_to_drain_that_cannot_be_sent_is_an_invalid_argument(seconds: float) -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgument, match="drain_timeout_s: "):
            await client.drain_worker("decode-0", drain_timeout_s=seconds, timeout=1.0)
        with pytest.raises(InvalidArgument, match="drain_timeout_s: "):
            await client.restart_router("router-0", drain_timeout_s=seconds, timeout=1.0)
