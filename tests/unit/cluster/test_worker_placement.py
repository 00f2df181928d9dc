"""Which node takes a worker, and what is said where none does: tables."""

from __future__ import annotations

import pytest

from cluster.config import PoolConfig
from cluster.nodes.labels import checked_selector, is_met
from cluster.nodes.placement import Node, Wanted, assign, why_pending

A = Node("a", "10.0.0.1", {"CPU": 4, "memory": 2.0**33}, {"CPU": 1, "memory": 2.0**33}, {"zone": "a"})
B = Node("b", "10.0.0.2", {"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 1}, {"zone": "b", "role": "decode"})


def wanted(**pool: object) -> Wanted:
    return Wanted.by(PoolConfig.model_validate(pool))


@pytest.mark.parametrize(
    ("selector", "value", "is_allowed"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "a", False),
        ("!a", "b", True),
        ("!a", None, True),
        ("in(a, b)", "b", True),
        ("in(a,b)", "c", False),
        ("!in(a, b)", "b", False),
        ("!in(a, b)", "c", True),
        ("H100-80.G_x", "H100-80.G_x", True),
    ],
)
def test_a_selector_is_what_ray_takes_it_for(selector: str, value: str | None, is_allowed: bool) -> None:
    labels = {} if value is None else {"zone": value}
    assert is_met({"zone": checked_selector(selector)}, labels) is is_allowed


@pytest.mark.parametrize("selector", ["", "-a", "a b", "in()", "in(a", "in(a,)", "!!a", "a" * 64])
def test_what_ray_would_refuse_is_no_selector(selector: str) -> None:
    with pytest.raises(ValueError, match="no label selector"):
        checked_selector(selector)


def test_a_pool_wants_its_resources_and_labels() -> None:
    asked = wanted(
        resources={"num_cpus": 2, "num_gpus": 0.5, "memory": "2GiB", "custom": {"disk": 1}},
        accelerator_type="H100",
        node_labels={"zone": "!a"},
    )
    assert str(asked) == "CPU 2, GPU 0.5, memory 2.0GiB, disk 1, zone=!a, ray.io/accelerator-type=H100"
    assert str(wanted(resources={"num_cpus": 0})) == "nothing"
    assert str(asked.only_on(["x", "y"])).count("the node of pdserve up") == 1


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            wanted(node_labels={"zone": "c"}),
            "no node has zone=c (10.0.0.1 has zone=a; 10.0.0.2 has zone=b role=decode)",
        ),
        (
            wanted(resources={"num_gpus": 2}),
            "no node is large enough (10.0.0.1 has CPU 4, GPU 0; 10.0.0.2 has CPU 2, GPU 1)",
        ),
        (
            wanted(resources={"num_cpus": 3}, node_labels={"zone": "b"}),
            "no such node is large enough (10.0.0.2 has CPU 2)",
        ),
        (
            wanted(resources={"num_cpus": 3}),
            "the nodes that could take it are full (10.0.0.1 has CPU 1 of 4 free)",
        ),
        (wanted(resources={"num_cpus": 2}), "there is room for it now"),
    ],
)
def test_a_worker_without_a_place_is_told_why(asked: Wanted, told: str) -> None:
    assert why_pending(asked, [A, B]) == told


def test_a_hundred_nodes_are_not_all_named() -> None:
    told = why_pending(wanted(resources={"num_cpus": 9}), [A] * 100)
    assert told.count("10.0.0.1") == 4
    assert told.endswith("; and 96 more)")
    assert why_pending(wanted(), []) == "Ray has no nodes"


def test_workers_share_out_the_nodes() -> None:
    one = wanted()
    given = assign(
        [one, one, one, wanted(node_labels={"zone": "b"}), wanted(resources={"num_gpus": 1})], [A, B]
    )
    names = [place.node_id if place is not None else None for place in given.places]
    assert names == ["a", "b", "b", None, None]
    assert [node.free["CPU"] for node in given.nodes] == [0, 0]
    assert why_pending(one, given.nodes).startswith("the nodes that could take it are full")
