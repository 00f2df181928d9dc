"""Prompts, answers and keys are written nowhere, at no level: all that a run at `debug` wrote is searched."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.loading import load_model
from observability.config import LogFormat, LogLevel, ObservabilityConfig
from observability.logs import log_by
from pdserve.client import Client, Internal, InvalidArgument, PdserveError, Unauthenticated
from router.access.keys import Permission, new_key
from router.router import Router
from tests.certificates import Authority, Pair
from tests.integration.access.callers import Keys
from tests.integration.http.raw import post
from tests.integration.router.harness import running
from tests.integration.router.test_process import process
from tests.models import tiny_model
from tests.serving import serving

MARKER = "swordfish"
DEBUG = ObservabilityConfig(log_level=LogLevel.DEBUG)


@contextmanager
def written(log_format: LogFormat) -> Iterator[io.StringIO]:
    """What this process logs meanwhile, with every field of every line."""
    stream, root = io.StringIO(), logging.getLogger()
    before, handler = root.level, logging.StreamHandler(stream)
    log_by(handler, ObservabilityConfig(log_level=LogLevel.DEBUG, log_format=log_format))
    # What libraries say below info is no line of a cluster's logs, and is searched all the same.
    handler.filters.clear()
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


async def use(client: Client) -> list[str]:
    """All ways through, right and wrong; the texts of the answers."""
    chat = [{"role": "user", "content": MARKER}]
    answer = await client.generate(MARKER, max_tokens=24, seed=3, ignore_eos=True, stop=f"{MARKER}-stop")
    texts = [answer.text]
    async for event in client.generate_stream(chat, max_tokens=8, seed=3, logprobs=2, n=2):
        texts.append(getattr(event, "text", ""))
    stream = client.generate_stream(MARKER, max_tokens=100, ignore_eos=True)
    await stream.__anext__()
    await stream.aclose()
    for options in (
        {"model": MARKER},
        {"regex": f"({MARKER}"},
        {"json_schema": {"type": MARKER}},
        {"grammar": MARKER},
        {"stop": [""]},
        {"timeout": 0.001},
        {"max_tokens": 10**6},
    ):
        with pytest.raises(PdserveError):
            await client.generate(f"{MARKER} {MARKER}", **options)  # type: ignore[arg-type]
    return texts


@pytest.mark.parametrize("log_format", LogFormat)
async def test_a_run_at_debug_tells_of_no_prompt_no_answer_and_no_key(
    tmp_path: Path, keys: Keys, log_format: LogFormat
) -> None:
    folder = tiny_model(tmp_path / "model")
    loaded = load_model(ModelConfig(id=str(folder), device="cpu"))
    wrong = new_key("x", [Permission.ADMIN])[0]
    settings = {"http": "127.0.0.1:0", **keys.settings}
    with written(log_format) as log:
        async with serving(folder, loaded, router=settings, observability=DEBUG, num_blocks=128) as cluster:
            async with Client(cluster.server.address, api_key=keys.user) as client:
                texts = await use(client)
            async with Client(cluster.server.address, api_key=wrong) as client:
                with pytest.raises(Unauthenticated):
                    await client.generate(MARKER)
            address = cluster.server.http_address or ""
            for key in (keys.user, wrong):
                for body in (
                    {"prompt": MARKER, "max_tokens": 4},
                    {"prompt": MARKER, "max_tokens": 4, "stream": True},
                    {"prompt": {"of": MARKER}},
                    {"prompt": MARKER, "temperature": MARKER},
                ):
                    headers = {"authorization": f"Bearer {key}"}
                    if not body.get("stream") or key == wrong:
                        await post(address, "/v1/completions", json.dumps(body).encode(), headers)
                await post(address, "/v1/completions", f'{{"prompt": "{MARKER}'.encode(), headers)
    lines = log.getvalue()
    # It was listened to.
    assert "RECEIVED" in lines
    assert "FINISHED" in lines
    for secret in (MARKER, keys.user, wrong, keys.file.read_text().split()[2]):
        assert secret not in lines
    for text in texts:
        assert len(text) < 4 or text not in lines


async def test_a_bug_is_logged_without_what_was_asked(
    model_dir: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Router, *_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    with written(LogFormat.TEXT) as log:
        async with running(model_dir, http="127.0.0.1:0", **keys.settings) as cluster:
            monkeypatch.setattr(Router, "generate", broken)
            async with Client(cluster.server.address, api_key=keys.user) as client:
                with pytest.raises(Internal) as told:
                    await client.generate(MARKER)
            headers, body = {"authorization": f"Bearer {keys.user}"}, {"prompt": MARKER}
            answer = await post(
                cluster.server.http_address or "", "/v1/completions", json.dumps(body).encode(), headers
            )
            assert answer.status == 500
    # Under the id that the client was told, the log has the rest.
    for message in (told.value.message, str(answer.error["message"])):
        (error_id,) = re.findall(r"^internal error ([0-9a-f]{32})$", message)
        assert f"bug error_id={error_id}" in log.getvalue()
    assert "RuntimeError: a bug" in log.getvalue()
    assert MARKER not in log.getvalue()
    assert keys.user not in log.getvalue()


async def test_a_router_process_writes_none_of_it_either(
    model_dir: Path, keys: Keys, pair: Pair, authority: Authority, tmp_path: Path
) -> None:
    """What it says on stderr is what stands in logs/router.log."""
    tls = {"cert": pair.cert, "key": pair.key}
    async with (
        running(model_dir, tls=tls, **keys.settings) as cluster,
        process(cluster, tmp_path, log_level=LogLevel.DEBUG) as child,
    ):
        assert child.stdout is not None
        address = json.loads(await child.stdout.readline())["grpc"]
        async with Client(address, api_key=keys.user, ca=authority.cert) as client:
            answer = await client.generate(MARKER, max_tokens=24, seed=3, timeout=60)
            with pytest.raises(InvalidArgument):
                await client.generate(MARKER, stop=[""])
        async with Client(address, api_key=keys.user + MARKER, ca=authority.cert) as client:
            with pytest.raises(Unauthenticated):
                await client.generate(MARKER)
        assert child.stdin is not None
        child.stdin.close()
        _, said = await child.communicate()
    assert "FINISHED" in said.decode()
    assert len(answer.text) > 3
    for secret in (MARKER, keys.user, answer.text):
        assert secret not in said.decode()
