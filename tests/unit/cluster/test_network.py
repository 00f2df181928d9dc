"""Workers leave loopback only where the configuration says that the network is to be trusted."""

from __future__ import annotations

import pytest

from cluster.config_file import ConfigError, parse_config
from cluster.errors import PartError
from cluster.nodes.network import Bind, choose_bind, in_url, is_here

HERE, THERE = "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("network", "nodes", "chosen"),
    [
        ("bind: auto", ["127.0.0.1"], Bind.LOOPBACK),
        ("bind: auto", ["127.0.0.1", "127.0.0.1", "::1"], Bind.LOOPBACK),
        ("bind: auto", [HERE], Bind.LOOPBACK),
        ("bind: loopback", [HERE, THERE], Bind.LOOPBACK),
        ("bind: node, insecure: true", [HERE, THERE], Bind.NODE),
        ("bind: node, insecure: true", ["127.0.0.1"], Bind.NODE),
    ],
)
def test_where_workers_listen(network: str, nodes: list[str], chosen: Bind) -> None:
    config = parse_config(f"name: x\npools: {{colocated: {{}}}}\nnetwork: {{{network}}}\n", "f")
    assert choose_bind(config, nodes, HERE) is chosen


def test_nobody_is_put_on_a_network_without_having_said_so() -> None:
    config = parse_config("name: x\npools: {colocated: {}}\n", "f")
    with pytest.raises(PartError, match=r"other nodes \(10\.0\.0\.2\).*network: \{bind: node\}"):
        choose_bind(config, [HERE, THERE], HERE)


def test_nothing_is_said_in_the_clear_over_a_network_without_having_said_so() -> None:
    with pytest.raises(ConfigError, match=r"^f:3: network: bind: node .* tls: .* or write insecure: true"):
        parse_config("name: x\npools: {colocated: {}}\nnetwork: {bind: node}\n", "f")
    tls = "tls: {ca: ca.pem, cert: part.pem, key: part-key.pem}"
    config = parse_config(f"name: x\npools: {{colocated: {{}}}}\nnetwork: {{bind: node, {tls}}}\n", "f")
    assert config.network.tls is not None
    assert config.network.tls.name == "pdserve"


def test_addresses_in_words() -> None:
    assert [in_url(each) for each in (HERE, "::1")] == [HERE, "[::1]"]
    assert [is_here(each, HERE) for each in (HERE, THERE, "localhost", "127.0.0.3")] == [
        True,
        False,
        True,
        True,
    ]
