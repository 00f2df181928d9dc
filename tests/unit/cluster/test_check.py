"""`pdserve check` finds what would fail before anything is started."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.check import Report, Severity, check
from cluster.config_file import parse_config
from cluster.nodes.memory import ROUTER_BYTES
from cluster.nodes.processes import ProcessId
from cluster.state import ClusterRecord, write_record
from pdserve.cli.app import app
from tests.certificates import Authority
from tests.models import tiny_model

GIB = 2**30
# Not the default port, which a cluster may have.
ROUTER = "router: {grpc: '127.0.0.1:59999'}\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def checked(model: Path | str, pools: str, more: str = "") -> Report:
    return check(parse_config(f"name: x\nmodel: {{id: '{model}'}}\n{ROUTER}pools: {pools}\n{more}", "f"))


def errors(report: Report) -> list[str]:
    return [each.message for each in report.findings if each.severity is Severity.ERROR]


def test_a_good_configuration_is_told_what_it_takes(model: Path) -> None:
    report = checked(model, "{prefill: {replicas: 2, engine: {num_blocks: 64}}, decode: {}}")
    assert errors(report) == []
    assert report.facts is not None
    (_, prefill), (_, decode) = report.workers
    # 2 layers, K and V, 2 KV heads, 16 tokens, 16 numbers of float32 a head.
    assert prefill.kv_bytes == 64 * 2 * 2 * 2 * 16 * 16 * 4
    assert prefill.weights_bytes == report.facts.num_weights * 4
    assert decode.kv_bytes == GIB
    (here,) = report.memory
    assert here.num_workers == 3
    assert here.needed_bytes > 2 * prefill.host_bytes + decode.host_bytes


def test_a_certificate_that_soon_expires_and_an_open_port_are_warned_of(model: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    soon, late = authority.issue("soon", for_days=3.5), authority.issue("late", for_days=60)

    def warned(router: str) -> list[str]:
        text = f"name: x\nmodel: {{id: '{model}'}}\nrouter: {{{router}}}\npools: {{colocated: {{}}}}\n"
        return [each.message for each in check(parse_config(text, "f")).findings if "router." in each.message]

    tls = "grpc: '127.0.0.1:59999', tls: {{cert: {0.cert}, key: {0.key}}}"
    (told,) = warned(tls.format(soon))
    assert told.startswith(f"router.tls.cert: '{soon.cert}' expires in 3 days")
    assert warned(tls.format(late)) == []
    elsewhere = authority.issue("elsewhere", for_days=60, host="10.0.0.1")
    assert warned(tls.format(elsewhere)) == [
        f"router.tls.cert: '{elsewhere.cert}' is for 10.0.0.1: clients at 127.0.0.1 will not take it"
    ]
    assert warned(tls.format(authority.issue("named", for_days=60, host="pd.example.org"))) == []
    open_to_all = "grpc: '0.0.0.0:59999', insecure: true"
    assert warned(open_to_all) == [
        "router.grpc: 0.0.0.0:59999 is open to the network, without encryption and keys"
    ]


def test_each_further_router_takes_memory_and_wants_its_port(model: Path) -> None:
    pools = f"name: x\nmodel: {{id: '{model}'}}\npools: {{colocated: {{}}}}\n"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        reports = [
            check(parse_config(f"{pools}router: {{grpc: '127.0.0.1:{port - 1}', replicas: {number}}}\n", "f"))
            for number in (1, 2)
        ]
    needed = [report.memory[0].needed_bytes for report in reports]
    assert needed[1] - needed[0] == ROUTER_BYTES
    taken = f"router.grpc of router-1: 127.0.0.1:{port} cannot be used"
    assert any(taken in told for told in errors(reports[1]))
    assert not any(f"127.0.0.1:{port} cannot be used" in told for told in errors(reports[0]))


@pytest.mark.parametrize(
    ("pools", "told"),
    [
        ("{colocated: {engine: {kv_cache: 100000GiB}}}", "memory: 1 workers on 127.0.0.1 need 100001."),
        (
            "{colocated: {replicas: 3, resources: {num_cpus: 30}}}",
            "pools.colocated: 1 of 3 workers find no place on this machine: wants CPU 30; the nodes that "
            "could take it are full (127.0.0.1 has CPU 4 of 64 free)",
        ),
        ("{colocated: {node_labels: {zone: a}}}", "no node has zone=a (127.0.0.1 has no labels)"),
        (
            "{colocated: {engine: {kv_cache: 100}}}",
            "pools.colocated.engine: kv_cache is smaller than one block",
        ),
        ("{colocated: {runtime_env: {working_dir: /none}}}", "runtime_env: there is no folder /none"),
    ],
)
def test_what_would_fail_is_an_error(model: Path, pools: str, told: str) -> None:
    (message,) = errors(checked(model, pools))
    assert told in message


def test_pools_that_would_differ_in_dtype_are_told(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    told = errors(checked(model, "{prefill: {resources: {num_gpus: 1}}, decode: {}}"))
    assert any("differ in dtype (prefill float16, decode bfloat16): set model.dtype" in each for each in told)


@pytest.mark.parametrize("family", ["mamba", "bloom", "deepseek_v3"])
def test_an_architecture_that_is_not_served_is_told_by_name(tmp_path: Path, family: str) -> None:
    (message,) = errors(checked(tiny_model(tmp_path, family), "{colocated: {}}"))
    assert message.startswith(f"model: {family}: ")


def test_models_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    (model / "tokenizer.json").rename(model / "tokenizer.away")
    (message,) = errors(checked(model, "{colocated: {}}"))[:1]
    assert message == f"model: the folder {model} has no tokenizer.json"
    (model / "tokenizer.away").rename(model / "tokenizer.json")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (message,) = errors(checked(model, "{colocated: {}}"))
    assert f"{weights} has " in message
    (message,) = errors(checked("/none/at/all", "{colocated: {}}"))
    assert message == "model: there is no folder /none/at/all"
    (message,) = errors(checked(tmp_path / "none.gguf", "{colocated: {}}"))
    assert "there is no file" in message


@pytest.mark.parametrize(("wanted", "severity"), [("on", Severity.ERROR), ("auto", Severity.NOTE)])
def test_a_machine_without_a_compiler_is_told(
    model: Path, wanted: str, severity: Severity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    text = f"name: x\nmodel: {{id: '{model}', compile: {wanted}}}\n{ROUTER}pools: {{colocated: {{}}}}\n"
    assert _severities(text) == [severity]
    elsewhere = check(parse_config(text + "ray: {address: '127.0.0.1:1'}\n", "f"))
    assert elsewhere.is_ok
    assert _severities(text.replace(wanted, "off")) == []


def _severities(text: str) -> list[Severity]:
    """Of what is found about the kernels."""
    findings = check(parse_config(text, "f")).findings
    return [each.severity for each in findings if "model.compile" in each.message]


def test_a_context_that_the_model_has_not_is_told(model: Path) -> None:
    report = check(
        parse_config(
            f"name: x\nmodel: {{id: '{model}', max_model_len: 99999}}\n{ROUTER}pools: {{colocated: {{}}}}\n",
            "f",
        )
    )
    assert "model: max_model_len 99999 is more than the model's context of 2048" in errors(report)


def test_a_small_pool_and_a_model_that_is_elsewhere_are_warnings(model: Path) -> None:
    report = checked(model, "{colocated: {engine: {num_blocks: 4}}}")
    assert report.is_ok
    assert any("holds 64 tokens; a request of the full context of 2048" in f.message for f in report.findings)
    report = checked("nobody/has-this-model", "{colocated: {}}")
    assert report.is_ok
    assert report.findings[0].severity is Severity.WARNING
    assert "is not on this machine" in report.findings[0].message


def test_a_ray_that_does_not_answer_is_said_plainly(model: Path) -> None:
    report = checked(model, "{colocated: {}}", "ray: {address: '127.0.0.1:1'}\n")
    assert report.is_ok
    assert report.nodes_of == "this machine"
    assert report.findings[0].message.startswith("Ray at 127.0.0.1:1 cannot be reached")


def test_a_port_that_takes_connections_and_answers_none_is_no_ray(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        report = checked(model, "{colocated: {}}", f"ray: {{address: '127.0.0.1:{port}'}}\n")
    assert report.findings[0].message.startswith(
        f"Ray at 127.0.0.1:{port} cannot be reached: it does not answer"
    )


def test_a_taken_port_is_an_error_unless_the_cluster_itself_runs(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        router = ROUTER.replace("59999", str(port))
        text = f"name: x\nmodel: {{id: '{model}'}}\n{router}pools: {{colocated: {{}}}}\n"
        config = parse_config(text, "f")
        taken = f"router.grpc: 127.0.0.1:{port} cannot be used: Address already in use"
        assert errors(check(config)) == [taken]
        here = (ProcessId.of(os.getppid()),)
        write_record(ClusterRecord(name="x", router="", ray_folder=tmp_path, processes=here))
        report = check(config)
    assert report.is_ok
    warned = [each.message for each in report.findings if each.severity is Severity.WARNING]
    assert warned == ['the cluster "x" runs already: `up` works after pdserve down x', taken]


def test_the_command_exits_with_what_it_found(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"name: x\nmodel: {{id: '{model}'}}\n{ROUTER}pools: {{colocated: {{}}}}\n")
    done = CliRunner().invoke(app, ["check", str(path), "--json"])
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["nodes_of"] == "this machine"
    assert report["workers"][0]["pool"] == "colocated"
    path.write_text("name: x\npools: {colocated: {replicas: 70}}\n")
    assert CliRunner().invoke(app, ["check", str(path)]).exit_code == 1
    path.write_text("name: x\npols: {}\n")
    done = CliRunner().invoke(app, ["check", str(path), "--json"])
    assert done.exit_code == 1
    assert any("did you mean" in each["message"] for each in json.loads(done.stdout)["findings"])
