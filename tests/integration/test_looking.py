"""`pdserve top` and `generate --explain` on real workers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.loading import load_model
from pdserve.client import ChatMessage
from tests.models import tiny_model
from tests.serving import Serving, serving

_TIMEOUT_S = 100.0


async def command(served: Serving, *arguments: str) -> str:
    """What a `pdserve` command prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.cli.main", *arguments, "--address", served.server.address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, complaints = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, complaints.decode()
    return printed.decode()


@pytest.mark.timeout(240)
async def test_a_look_at_real_workers(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    loaded = load_model(ModelConfig(id=str(folder), dtype="float32", device="cpu", compile="off"))
    async with serving(folder, loaded) as served:
        for word in ("one", "two", "three", "four"):
            await served.client.generate([ChatMessage("user", word * 20)], max_tokens=20, ignore_eos=True)
        seen = await command(served, "top", "--once")
        assert "TTFT p50/p99" in seen
        assert [
            line.split()[:2] for line in seen.splitlines() if line.startswith(("prefill-0", "decode-1"))
        ] == [
            ["prefill-0", "READY"],
            ["decode-1", "READY"],
        ]
        ids = ",".join(str(each) for each in range(3, 203))
        told = await command(served, "generate", "--token-ids", ids, "--max-tokens", "12", "--explain")
        rows = {line.split("  ")[0]: line for line in told.splitlines()}
        assert (
            "of this machine's" in rows["prefill's work"] or "all that this machine" in rows["prefill's work"]
        )
        assert "MB read a step" in rows["decode's work"]
        assert "without it, decoding would have taken" in rows["KV cache"]
        assert "▲" in told
