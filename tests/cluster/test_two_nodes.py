"""A Ray of two nodes on one machine: prefill on the one, decode on the other, and what finds no place.

Both nodes are on loopback, and the parts speak TLS. The tests share the nodes; each ends what it started.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.folders import PACKAGES
from cluster.nodes.local_ray import make_folder, ray_environment, remove_folder
from tests.cluster.commands import Commands, free_port
from tests.models import tiny_model
from tests.unit.trust.certificates import PartsAuthority

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
PROMPT = [5 + 7 * n % 500 for n in range(70)]


@dataclass(frozen=True)
class TwoNodes:
    address: str
    raylets: dict[str, int]  # zone → pid
    model: Path


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """Zone a has 2 CPUs, zone b has 3."""
    folder = make_folder()
    (folder / "ray").mkdir()  # Ray's test cluster notes its address there, in RAY_TMPDIR
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ray_environment(folder), "RAY_TMPDIR": str(folder)}.items():
            patch.setenv(name, value)
        from ray._private.authentication_test_utils import reset_auth_token_state
        from ray.cluster_utils import Cluster  # reads the environment

        reset_auth_token_state()  # a process that spoke to a Ray before has read it once and for all
        common = {"node_ip_address": "127.0.0.1", "temp_dir": str(folder)}
        head = {"num_cpus": 2, "labels": {"zone": "a"}, "include_dashboard": False, "gcs_server_port": 0}
        ray = Cluster(initialize_head=True, head_node_args={**common, **head})
        try:
            other = ray.add_node(num_cpus=3, labels={"zone": "b"}, **common)
            raylets = {
                zone: node.all_processes["raylet"][0].process.pid
                for zone, node in (("a", ray.head_node), ("b", other))
            }
            yield TwoNodes(ray.address, raylets, tiny_model(tmp_path_factory.mktemp("model")))
        finally:
            ray.shutdown()
            remove_folder(folder)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    (tmp_path / "elsewhere").mkdir()
    commands = Commands(tmp_path, cwd=tmp_path / "elsewhere")
    yield commands
    for folder in (tmp_path / "pdserve").glob("*"):
        commands.run("down", folder.name)


def write_config(
    commands: Commands, nodes: TwoNodes, name: str, prefill: str, decode: str, more: str = ""
) -> str:
    path, parts = commands.home / f"{name}.yaml", PartsAuthority(commands.home).files("part")
    path.write_text(
        f"""\
name: {name}
model: {{id: "{nodes.model}", dtype: float32, max_model_len: 1024}}
router: {{grpc: "127.0.0.1:{free_port()}"}}
pools:
  prefill: {{{prefill}, engine: {{num_blocks: 128, max_num_batched_tokens: 32}}}}
  decode: {{{decode}, engine: {{num_blocks: 128}}}}
network: {{bind: node, tls: {{ca: "{parts.ca}", cert: "{parts.cert}", key: "{parts.key}"}}}}
ray: {{address: "{nodes.address}"}}
{more}"""
    )
    return str(path)


def reference(folder: Path, max_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([PROMPT])
    with torch.inference_mode():
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False
        )
    return [int(each) for each in tokens[0, len(PROMPT) :]]


def generate(commands: Commands) -> dict[str, object]:
    ids = ",".join(str(each) for each in PROMPT)
    answer = commands.succeed("generate", "--token-ids", ids, "--max-tokens", "24", "--json")
    result: dict[str, object] = json.loads(answer)
    return result


@pytest.mark.full
def test_kv_goes_from_one_node_to_the_other_and_the_code_to_both(
    commands: Commands, nodes: TwoNodes, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
    brought = f'runtime_env: {{working_dir: "{code}", env_vars: {{PDSERVE_TEST_MARK: 1}}}}'
    path = write_config(
        commands, nodes, "two", "node_labels: {zone: a}", f"node_labels: {{zone: b}}, {brought}"
    )
    report = json.loads(commands.succeed("check", path, "--json"))
    assert report["nodes_of"] == f"the Ray at {nodes.address} (2 nodes)"
    assert sorted(node["num_workers"] for node in report["nodes"]) == [1, 1]
    commands.succeed("up", path)

    answer = generate(commands)
    assert answer["token_ids"] == reference(nodes.model, 24)
    assert (answer["prefill_worker"], answer["decode_worker"]) == ("prefill-0", "decode-0")

    prefill, decode = (psutil.Process(commands.worker(role)["pid"]) for role in ("prefill", "decode"))
    assert (prefill.ppid(), decode.ppid()) == (nodes.raylets["a"], nodes.raylets["b"])
    log = (commands.home / "pdserve" / "two" / "logs" / "decode-0.log").read_text()
    assert f"code={decode.cwd()}" in log
    assert "working_dir_files" in decode.cwd()
    assert decode.environ()["PDSERVE_TEST_MARK"] == "1"

    # Zone a has one CPU left: a third worker finds no place, and keeps nobody from anything.
    commands.succeed("scale", "prefill=3", "--no-wait")
    full = "the nodes that could take it are full (127.0.0.1 has CPU 0 of 2 free)"
    _until_status_says(commands, f": waits to be placed: wants CPU 1, zone=a; {full}")
    commands.succeed("scale", "decode=2")
    begun = time.monotonic()
    commands.succeed("scale", "prefill=1", "decode=1")
    assert time.monotonic() - begun < 10
    assert generate(commands)["token_ids"] == answer["token_ids"]

    processes = _workers(nodes)
    assert "two is down" in commands.succeed("down")
    psutil.wait_procs(processes, timeout=5)
    assert [process for process in processes if process.is_running()] == []
    for pid in nodes.raylets.values():
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("decode", "told"),
    [
        pytest.param(
            "node_labels: {zone: c}",
            "not ready within 4 s: waits to be placed: wants CPU 1, zone=c; no node has zone=c (",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "resources: {num_cpus: 1, num_gpus: 1}",
            "not ready within 4 s: waits to be placed: wants CPU 1, GPU 1; no node is large enough (",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "accelerator_type: H100",
            "wants CPU 1, ray.io/accelerator-type=H100; no node has ray.io/accelerator-type=H100 (",
            marks=pytest.mark.full,
        ),
        ('runtime_env: {working_dir: "/none/at/all"}', "runtime_env: there is no folder /none/at/all"),
    ],
)
def test_an_up_whose_workers_find_no_place_says_why_and_leaves_nothing(
    commands: Commands, nodes: TwoNodes, decode: str, told: str
) -> None:
    path = write_config(commands, nodes, "nowhere", "node_labels: {zone: a}", f"{decode}, start_timeout_s: 4")
    assert commands.run("check", path).returncode == 1
    assert told in commands.fail("up", path)
    assert commands.record("nowhere") is None
    processes = _workers(nodes)
    psutil.wait_procs(processes, timeout=5)
    assert [process for process in processes if process.is_running()] == []


def _workers(nodes: TwoNodes) -> list[psutil.Process]:
    """All processes below the nodes in which an actor of ours runs."""
    found = []
    for pid in nodes.raylets.values():
        for process in psutil.Process(pid).children(recursive=True):
            try:
                name = " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if any(word in name for word in ("WorkerActor", "Controller", "RouterActor", "router")):
                found.append(process)
    return found


def _until_status_says(commands: Commands, words: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while words not in (told := commands.succeed("status")):
        assert time.monotonic() < deadline, told
