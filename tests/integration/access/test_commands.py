"""The command line against a router that asks for certificates and keys."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.certificates import Authority, Pair
from tests.integration.access.callers import Keys
from tests.integration.router.harness import running, until
from tests.scripted_workers import expected


async def pdserve(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    """Exit code, stdout, stderr."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.cli.main", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        env=os.environ | environment,
    )
    try:
        out, err = await asyncio.wait_for(child.communicate(), 100)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return child.returncode, out.decode(), err.decode()


async def test_commands_show_what_they_are_given(
    model_dir: Path, keys: Keys, pair: Pair, authority: Authority
) -> None:
    client = authority.issue("commands")
    tls = {"cert": pair.cert, "key": pair.key, "client_ca": authority.cert}
    files = ("--ca", str(authority.cert), "--cert", str(client.cert), "--key", str(client.key))
    variables = {
        "PDSERVE_CA": str(authority.cert),
        "PDSERVE_CERT": str(client.cert),
        "PDSERVE_KEY": str(client.key),
    }
    async with running(model_dir, http="127.0.0.1:0", tls=tls, **keys.settings) as cluster:
        at = ("--address", cluster.server.address)
        asked = ("generate", "--token-ids", "1", "--max-tokens", "5", "--seed", "1", "--json", *at)
        code, out, err = await pdserve(*asked, *files, PDSERVE_API_KEY=keys.user)
        assert code == 0, err
        assert tuple(json.loads(out)["token_ids"]) == expected([1], 1, 5)
        code, out, err = await pdserve("status", "--json", *at, PDSERVE_API_KEY=keys.admin, **variables)
        assert code == 0, err
        assert "decode-0" in out
        code, out, err = await pdserve(*asked, *files, PDSERVE_API_KEY="wrong")
        assert (code, out) == (1, "")
        assert "the API key is not known here" in err
        stranger = Authority(pair.cert.parent, "stranger")
        for shown, words in (((), "may want TLS"), (("--ca", str(stranger.cert)), "is not of the CA")):
            code, out, err = await pdserve(*asked, *shown)
            assert (code, out) == (1, "")
            (line,) = err.splitlines()  # and none of gRPC's own
            assert words in line
        load = ("--requests", "3", "--rate", "50", "--input-tokens", "8", "--output-tokens", "4", "--json")
        for where in (("--url", f"https://{cluster.server.http_address}"), at):
            code, out, err = await pdserve(
                *("bench", "serve", *where, *load),
                **variables,
                PDSERVE_API_KEY=keys.user,
                OPENAI_API_KEY=keys.user,
            )
            assert code == 0, err
            assert keys.user not in out + err


async def test_what_came_before_a_stream_broke_is_in_the_json_object(model_dir: Path) -> None:
    async with running(model_dir) as cluster:
        cluster.d.step_s = 0.05
        asked = ("--token-ids", "1", "--max-tokens", "200", "--seed", "1", "--json")
        work = asyncio.ensure_future(pdserve("generate", *asked, "--address", cluster.server.address))
        await until(lambda: bool(cluster.d.reserved), 100)
        await cluster.server.drain(1.0)
        code, out, err = await work
    told = json.loads(out)
    assert code == 1
    assert "the router stops" in err
    assert told["error"] == {"code": "UNAVAILABLE", "reason": "STOPPING", "message": "the router stops"}
    assert told["finish_reason"] is None
    tokens = told["token_ids"]
    assert tokens
    assert tuple(tokens) == expected([1], 1, 200)[: len(tokens)]
