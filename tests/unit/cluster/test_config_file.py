"""Each mistake in a configuration is told with its line, its key and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config_file import ConfigError, load_config, parse_config
from observability.config import LogFormat, TraceProtocol
from worker.identity import Role

CONFIGS = sorted((Path(__file__).parents[3] / "cluster_configs").glob("*.yaml"))
GOOD = """\
name: local
pools:
  prefill: {replicas: 2}
  decode:
    engine: {kv_cache: 2GiB}
"""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_that_we_ship_loads(path: Path) -> None:
    assert load_config(path).pools.by_role()


def test_names_and_ports_that_we_ship_differ_where_clusters_may_run_side_by_side() -> None:
    cpu = [load_config(path) for path in CONFIGS if "cpu" in path.name]
    assert len({config.name for config in cpu}) == len({config.router.grpc for config in cpu}) == len(cpu)


def test_what_is_not_said_has_its_default() -> None:
    config = parse_config(GOOD, "f.yaml")
    assert config.model.id == "smollm2-135m"
    assert config.router.grpc == "127.0.0.1:50051"
    assert config.ray.address == "local"
    assert config.pools.by_role()[Role.PREFILL].replicas == 2
    assert config.pools.by_role()[Role.DECODE].engine.kv_cache == 2 << 30


def test_router_replicas_count_on_from_the_ports_that_are_written() -> None:
    three = "router: {grpc: '127.0.0.1:50051', http: '127.0.0.1:8000', replicas: 3}\n"
    router = parse_config(GOOD + three, "f.yaml").router
    assert [address for key, address in router.all_addresses() if key == "grpc"] == [
        "127.0.0.1:50051",
        "127.0.0.1:50052",
        "127.0.0.1:50053",
    ]
    assert router.replica(2).http == "127.0.0.1:8002"
    assert router.replica(0) == router
    meet = "router: {grpc: '127.0.0.1:7998', http: '127.0.0.1:8000', replicas: 3}\n"
    with pytest.raises(ConfigError, match=r"http and grpc of router-2 are both 127\.0\.0\.1:8000: each"):
        parse_config(GOOD + meet, "f.yaml")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:65536"):
        parse_config(GOOD + "router: {grpc: '127.0.0.1:65535', replicas: 2}\n", "f.yaml")


def test_disaggregated_and_colocated_pools_may_stand_side_by_side() -> None:
    config = parse_config(GOOD + "  colocated: {}\n", "f.yaml")
    assert list(config.pools.by_role()) == [Role.PREFILL, Role.DECODE, Role.COLOCATED]


def test_speculation_is_off_unless_asked_for() -> None:
    asked = GOOD.replace("kv_cache: 2GiB", "speculative: {method: ngram, max_tokens: 5}")
    for text, max_tokens in ((GOOD, None), (asked, 5)):
        pools = parse_config(text, "f.yaml").pools.by_role()
        speculative = pools[Role.DECODE].engine.speculative
        assert max_tokens == (None if speculative is None else speculative.max_tokens)
        assert pools[Role.PREFILL].engine.speculative is None


def test_logs_and_traces_are_set_in_one_section() -> None:
    section = (
        "observability: {traces: {endpoint: 'http://127.0.0.1:4317'}, log_format: json, log_level: debug}\n"
    )
    config = parse_config(GOOD + section, "f.yaml").observability
    assert config.traces is not None
    assert (config.traces.protocol, config.log_format) == (TraceProtocol.GRPC, LogFormat.JSON)
    assert parse_config(GOOD + "observability: {traces: null}\n", "f.yaml").observability.traces is None


MISTAKES = {
    "an endpoint that is no URL": (
        GOOD + "observability:\n  traces:\n    endpoint: host:1\n",
        "f.yaml:8: observability.traces.endpoint: must be a URL like http://127.0.0.1:4317 (not 'host:1')",
    ),
    "a misspelt key of the traces": (
        GOOD + "observability: {traces: {endpoint: 'http://x:1', protocl: grpc}}\n",
        'f.yaml:6: observability.traces.protocl: unknown key; did you mean "protocol"?',
    ),
    "an unknown log format": (
        GOOD + "observability: {log_format: xml}\n",
        "f.yaml:6: observability.log_format: input should be 'text' or 'json' (not 'xml')",
    ),
    "unknown key": (
        "name: x\npools:\n  prefill: {}\n  decode:\n    engine:\n      kv_cashe: 1GiB\n",
        'f.yaml:6: pools.decode.engine.kv_cashe: unknown key; did you mean "kv_cache"?',
    ),
    "unknown key that is like none": (
        "name: x\npools: {colocated: {}}\nray: {zzz: 1}\n",
        "f.yaml:3: ray.zzz: unknown key; the keys here are address, num_cpus",
    ),
    "no decode pool": (
        "name: x\npools: {prefill: {}}\n",
        "f.yaml:2: pools: prefill workers need decode workers: add a decode pool",
    ),
    "no prefill pool": (
        "name: x\npools: {decode: {}}\n",
        "f.yaml:2: pools: decode workers need prefill workers: add a prefill pool",
    ),
    "no pool": (
        "name: x\npools: {}\n",
        "f.yaml:2: pools: there is no pool; name prefill and decode, or colocated",
    ),
    "no pools": ("name: x\n", "f.yaml:1: pools: missing"),
    "bad name": (
        "name: A b\npools: {colocated: {}}\n",
        "f.yaml:1: name: 'A b' is not a name; use lower-case letters, digits and dashes, 32 at most",
    ),
    "negative count": (
        "name: x\npools:\n  colocated:\n    replicas: -1\n",
        "f.yaml:4: pools.colocated.replicas: input should be greater than or equal to 0 (not -1)",
    ),
    "count without end": (
        "name: x\npools:\n  colocated:\n    replicas: 1025\n",
        "f.yaml:4: pools.colocated.replicas: input should be less than or equal to 1024 (not 1025)",
    ),
    "count that is no number": (
        "name: x\npools: {colocated: {threads: true}}\n",
        "f.yaml:2: pools.colocated.threads: input should be a valid integer (not True)",
    ),
    "bad size": (
        "name: x\npools: {colocated: {engine: {kv_cache: 1Gb}}}\n",
        "f.yaml:2: pools.colocated.engine.kv_cache: '1Gb' is not a size; write a number of bytes or one like "
        "512MiB, 1GiB, 2GB",
    ),
    "block sizes that differ": (
        "name: x\npools:\n  prefill: {engine: {block_size: 32}}\n  decode: {}\n",
        "f.yaml:2: pools: pools hand blocks to each other, so engine.block_size must be one: "
        "{'prefill': 32, 'decode': 16}",
    ),
    "speculation where nothing is decoded": (
        "name: x\npools:\n  decode: {}\n  prefill: {engine: {speculative: {method: ngram}}}\n",
        "f.yaml:4: pools.prefill: engine.speculative has no meaning here: a prefill worker draws one token a "
        "sequence; set it for the decode or the colocated pool",
    ),
    "a method of speculation that is not there": (
        "name: x\npools:\n  colocated:\n    engine:\n      speculative: {method: eagle}\n",
        "f.yaml:5: pools.colocated.engine.speculative.method: input should be 'ngram' (not 'eagle')",
    ),
    "speculation without a method": (
        "name: x\npools:\n  colocated:\n    engine:\n      speculative: {max_tokens: 4}\n",
        "f.yaml:5: pools.colocated.engine.speculative.method: missing",
    ),
    "a key of speculation": (
        "name: x\npools:\n  colocated:\n    engine:\n      speculative: {method: ngram, max_token: 4}\n",
        'f.yaml:5: pools.colocated.engine.speculative.max_token: unknown key; did you mean "max_tokens"?',
    ),
    "bad address": (
        "name: x\npools: {colocated: {}}\nrouter: {grpc: '50051'}\n",
        "f.yaml:3: router: grpc: '50051' is not host:port, like 127.0.0.1:50051",
    ),
    "a URL for an address": (
        "name: x\npools: {colocated: {}}\nrouter: {http: 'http://127.0.0.1:8000'}\n",
        "f.yaml:3: router: http: 'http://127.0.0.1:8000' is not host:port, like 127.0.0.1:50051",
    ),
    "no end of a start's time": (
        "name: x\npools: {colocated: {start_timeout_s: .inf}}\n",
        "f.yaml:2: pools.colocated.start_timeout_s: input should be less than or equal to 2592000 (not inf)",
    ),
    "two servers at one address": (
        "name: x\npools: {colocated: {}}\nrouter: {grpc: '127.0.0.1:1', http: '127.0.0.1:1'}\n",
        "f.yaml:3: router: grpc and http are both 127.0.0.1:1",
    ),
    "a value in place of keys": (
        "name: x\npools: {colocated: {}}\nray: 3\n",
        "f.yaml:3: ray: needs keys of its own: address, num_cpus",
    ),
    "a transport that is not there": (
        "name: x\npools: {colocated: {}}\nkv_transfer:\n  transport: rdma\n",
        "f.yaml:4: kv_transfer.transport: this version has no transport 'rdma'; "
        "there are: auto, shm, collective, grpc",
    ),
    "a way to verify that is not there": (
        "name: x\npools: {colocated: {}}\nkv_transfer: {verify: crc}\n",
        "f.yaml:3: kv_transfer.verify: input should be 'auto', 'off', 'checksum' or 'full' (not 'crc')",
    ),
    "no label selector": (
        "name: x\npools:\n  colocated:\n    node_labels:\n      zone: in(a,\n",
        "f.yaml:5: pools.colocated.node_labels.zone: 'in(a,' is no label selector; write a, !a, in(a, b) or "
        "!in(a, b)",
    ),
    "a key of a runtime environment": (
        "name: x\npools:\n  colocated:\n    runtime_env: {env_var: {A: 1}}\n",
        'f.yaml:4: pools.colocated.runtime_env.env_var: unknown key; did you mean "env_vars"?',
    ),
    "a key twice": ("name: x\nname: y\npools: {colocated: {}}\n", "f.yaml:2: name: this key stands twice"),
    "no YAML": ("a: [", "f.yaml:1: not YAML: expected the node content, but found '<stream end>'"),
    "no number": (
        "name: x\nmodel:\n  max_model_len: 0x_\n",
        "f.yaml:3: not YAML: invalid literal for int() with base 16: ''",
    ),
    "a section within itself": (
        "name: x\npools: &pools {colocated: *pools}\n",
        "f.yaml: not a configuration: nested too deeply",
    ),
    "empty": ("", "f.yaml: not a configuration: it has no keys"),
}


@pytest.mark.parametrize(("text", "told"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_told_with_its_place(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    assert caught.value.problems == [told]


def test_off_is_a_word_and_no_truth_value() -> None:
    text = "name: x\nmodel: {compile: off}\npools: {colocated: {engine: {%s}}}\nkv_transfer: {verify: off}\n"
    config = parse_config(text % "enable_prefix_caching: false", "f.yaml")
    assert (config.kv_transfer.verify, config.model.compile) == ("off", "off")
    assert config.pools.colocated is not None
    assert config.pools.colocated.engine.enable_prefix_caching is False


def test_what_looks_like_a_date_is_text() -> None:
    text = "name: 2026-02-30\npools: {colocated: {runtime_env: {env_vars: {BUILT: 2026-02-28}}}}\n"
    config = parse_config(text, "f.yaml")
    assert config.name == "2026-02-30"
    assert config.pools.colocated is not None
    assert config.pools.colocated.runtime_env.env_vars == {"BUILT": "2026-02-28"}


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("nam: x\npools: {colocated: {threads: 0}}\n", "f.yaml")
    assert caught.value.problems == [
        "f.yaml:1: name: missing",
        "f.yaml:2: pools.colocated.threads: input should be greater than 0",
        'f.yaml:1: nam: unknown key; did you mean "name"?',
    ]


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")


def test_what_is_nested_without_end_is_one_clear_line() -> None:
    for text in ("[" * 100_000, "a: " + "{b: " * 100_000):
        with pytest.raises(ConfigError) as raised:
            parse_config(text, "deep.yaml")
        assert raised.value.problems == ["deep.yaml: not a configuration: nested too deeply"]
