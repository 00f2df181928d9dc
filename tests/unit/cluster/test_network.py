"""Workers leave loopback only where the configuration says that the network is to be trusted."""

from __future__ import annotations

import pytest

from cluster.config_file import parse_config
from cluster.errors import PartError
from cluster.nodes.network import Bind, choose_bind, in_url, is_here

HERE, THERE = "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("bind", "nodes", "chosen"),
    [
        ("auto", ["127.0.0.1"], Bind.LOOPBACK),
        ("auto", ["127.0.0.1", "127.0.0.1", "::1"], Bind.LOOPBACK),
        ("auto", [HERE], Bind.LOOPBACK),
        ("loopback", [HERE, THERE], Bind.LOOPBACK),
        ("node", [HERE, THERE], Bind.NODE),
        ("node", ["127.0.0.1"], Bind.NODE),
    ],
)
def test_where_workers_listen(bind: str, nodes: list[str], chosen: Bind) -> None:
    config = parse_config(f"name: x\npools: {{colocated: {{}}}}\nnetwork: {{bind: {bind}}}\n", "f")
    assert choose_bind(config, nodes, HERE) is chosen


def test_nobody_is_put_on_a_network_without_having_said_so() -> None:
    config = parse_config("name: x\npools: {colocated: {}}\n", "f")
    with pytest.raises(PartError, match=r"other nodes \(10\.0\.0\.2\).*network: \{bind: node\}"):
        choose_bind(config, [HERE, THERE], HERE)


def test_addresses_in_words() -> None:
    assert [in_url(each) for each in (HERE, "::1")] == [HERE, "[::1]"]
    assert [is_here(each, HERE) for each in (HERE, THERE, "localhost", "127.0.0.3")] == [
        True,
        False,
        True,
        True,
    ]
