"""OpenAI's SDK pointed at a router of ours."""

from __future__ import annotations

from openai import AsyncOpenAI, DefaultAsyncHttpxClient


def sdk(address: str | None) -> AsyncOpenAI:
    """Asks once, whatever the answer; a proxy in the environment is for the world outside."""
    assert address is not None
    http = DefaultAsyncHttpxClient(trust_env=False)
    url = f"http://{address}/v1"
    return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30, http_client=http)
