"""`python -m router`: a process of its own, without torch, ray and transformers."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from observability.config import LogLevel, ObservabilityConfig
from pdserve.client import Client
from router.config import RouterConfig
from tests.cluster.commands import free_port
from tests.integration.http.raw import get
from tests.integration.router.harness import Cluster, running
from tests.scripted_workers import expected

REPOSITORY = Path(__file__).parents[3]

# As where a shell allows few files.
FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.argv[0] = "router"
from router.__main__ import main
sys.exit(main())
"""

# What `python -m router` runs, and then the names of all that it loaded.
SPY = """
import json, sys
sys.argv[0] = "router"
from router.__main__ import main
code = main()
sys.stdout.write(json.dumps(sorted(sys.modules)) + "\\n")
sys.exit(code)
"""


@asynccontextmanager
async def process(
    cluster: Cluster,
    folder: Path,
    *head: str,
    http: str | None = None,
    log_level: LogLevel = LogLevel.WARNING,
    **settings: object,
) -> AsyncIterator[asyncio.subprocess.Process]:
    path = folder / "router.json"
    logs = ObservabilityConfig(log_level=log_level)
    update = {"router_id": "router-1", "http": http, "observability": logs, **settings}
    config = cluster.router.config.model_copy(update=update)
    path.write_text(config.model_dump_json())
    assert RouterConfig.model_validate_json(path.read_bytes()) == config
    pipe = asyncio.subprocess.PIPE
    command = (*(head or ("-m", "router")), "--config", str(path))
    child = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=REPOSITORY
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def address_of(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    line = await asyncio.wait_for(child.stdout.readline(), 20)
    address = json.loads(line)["grpc"]
    assert isinstance(address, str)
    return address


async def generate_when_ready(address: str) -> tuple[int, ...]:
    async with Client(address) as client:
        answer = await client.generate("hello", max_tokens=5, seed=1, timeout=20)
        return answer.token_ids


async def test_a_router_that_has_served_never_loaded_torch_ray_or_transformers(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with process(cluster, tmp_path, "-c", SPY) as child:
        ids = await generate_when_ready(await address_of(child))
        assert ids == expected(list(cluster.p.prompts[-1]), 1, 5)
        assert child.stdin is not None
        child.stdin.close()
        out, _ = await asyncio.wait_for(child.communicate(), 10)
        loaded = {name.partition(".")[0] for name in json.loads(out)}
    assert child.returncode == 0
    assert "tokenizers" in loaded
    unwanted = {"torch", "ray", "transformers", "opentelemetry", "engine", "cluster", "kv_transfer"}
    assert not loaded & unwanted


async def test_a_process_without_http_says_so_and_one_with_it_where(cluster: Cluster, tmp_path: Path) -> None:
    async with process(cluster, tmp_path) as child:
        assert child.stdout is not None
        assert json.loads(await asyncio.wait_for(child.stdout.readline(), 20))["http"] is None
    async with process(cluster, tmp_path, http="127.0.0.1:0") as child:
        assert child.stdout is not None
        address = json.loads(await asyncio.wait_for(child.stdout.readline(), 20))["http"]
        assert (await get(address, "/live")).status == 200


async def test_a_router_may_have_all_the_connections_that_the_machine_allows(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with process(cluster, tmp_path, "-c", FEW_FILES) as child:
        await address_of(child)
        now, most = psutil.Process(child.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert now == most > 256


async def test_the_process_ends_when_its_stdin_closes(cluster: Cluster, tmp_path: Path) -> None:
    async with process(cluster, tmp_path) as child:
        await address_of(child)
        assert child.stdin is not None
        child.stdin.close()
        assert await asyncio.wait_for(child.wait(), 10) == 0


async def test_a_process_that_is_asked_to_says_again_and_again_that_it_runs(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with process(cluster, tmp_path, "-m", "router", "--beat") as child:
        await address_of(child)
        assert child.stdout is not None
        for _ in range(2):
            assert await asyncio.wait_for(child.stdout.readline(), 20) == b"\n"


async def test_on_sigterm_requests_in_flight_may_finish(cluster: Cluster, tmp_path: Path) -> None:
    cluster.d.step_s = 0.02
    async with process(cluster, tmp_path) as child, Client(await address_of(child)) as client:
        stream = client.generate_stream([1, 2], max_tokens=30, seed=1)
        ids: list[int] = []
        async for event in stream:
            ids.extend(getattr(event, "token_ids", ()))
            if len(ids) == 5:
                child.send_signal(signal.SIGTERM)
        assert tuple(ids) == expected([1, 2], 1, 30)
        assert await asyncio.wait_for(child.wait(), 10) == 0


async def test_another_process_takes_a_routers_ports_over_and_the_one_before_ends_what_it_has(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.d.step_s = 0.02
    port, http = free_port(), f"127.0.0.1:{free_port()}"
    ports = {"grpc": f"127.0.0.1:{port}", "local_socket": tmp_path / "router.sock"}
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    async with process(cluster, tmp_path / "before", http=http, **ports) as before:
        address = await address_of(before)
        async with Client(address) as client:
            stream = client.generate_stream([1, 2], max_tokens=60, seed=1)
            ids: list[int] = []
            how = ("-m", "router", "--beside")
            async with process(cluster, tmp_path / "after", *how, http=http, **ports) as after:
                async for event in stream:
                    ids.extend(getattr(event, "token_ids", ()))
                    if len(ids) == 5:
                        assert await address_of(after) == address
                        assert before.stdin is not None
                        before.stdin.write(b"drain 30\n")
                        answers = await asyncio.gather(*(generate_when_ready(address) for _ in range(5)))
                        assert set(answers) == {answers[0]}
                        assert (await get(http, "/live")).status == 200
                # On the same connection, with the same router.
                assert tuple(ids) == expected([1, 2], 1, 60)
                assert await asyncio.wait_for(before.wait(), 20) == 0
                assert len(await generate_when_ready(address)) == 5
                # Its end has not taken the new one's socket along.
                assert len(await generate_when_ready(f"unix:{tmp_path / 'router.sock'}")) == 5


async def complaint_of(folder: Path, settings: dict[str, object]) -> str:
    """What a router that cannot start says."""
    path = folder / "router.json"
    path.write_text(json.dumps(settings))
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--config", str(path), stdin=pipe, stderr=pipe, cwd=REPOSITORY
    )
    _, err = await asyncio.wait_for(child.communicate(), 20)
    assert child.returncode == 1
    return err.decode()


async def test_a_router_that_cannot_start_says_why(cluster: Cluster, tmp_path: Path) -> None:
    good = json.loads(cluster.router.config.model_dump_json())
    taken = await complaint_of(tmp_path, good | {"grpc": cluster.server.address})
    assert cluster.server.address in taken
    assert "Traceback" not in taken
    assert "tokenizer.json" in await complaint_of(tmp_path, good | {"model_dir": str(tmp_path)})
    assert "max_qeued_requests" in await complaint_of(tmp_path, good | {"max_qeued_requests": 3})


async def test_a_killed_routers_work_is_given_back(model_dir: Path, tmp_path: Path) -> None:
    async with running(model_dir) as cluster:
        cluster.d.step_s = 0.01
        async with process(cluster, tmp_path) as child, Client(await address_of(child)) as client:
            stream = client.generate_stream([1, 2], max_tokens=300)
            await stream.__anext__()
            child.kill()
            await child.wait()
            await stream.aclose()
