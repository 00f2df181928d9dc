"""Which nodes could take a worker, and why none does: functions of what Ray says of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.config import PoolConfig
from cluster.nodes.labels import ACCELERATOR_TYPE, NODE_ID, is_met

# More would fill the screen and say no more.
_MAX_NODES_NAMED = 4


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a Ray. Resources by Ray's own names: CPU, GPU, memory (bytes), and custom ones."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one worker asks of a node."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]

    @classmethod
    def by(cls, pool: PoolConfig) -> Wanted:
        asked = pool.resources
        amounts = {"CPU": asked.num_cpus, "GPU": asked.num_gpus, "memory": float(asked.memory or 0)}
        labels = dict(pool.node_labels)
        if pool.accelerator_type is not None:
            labels[ACCELERATOR_TYPE] = pool.accelerator_type
        return cls({name: amount for name, amount in (amounts | asked.custom).items() if amount}, labels)

    def only_on(self, node_ids: Iterable[str]) -> Wanted:
        """Here and nowhere else, unless the configuration itself names nodes."""
        return replace(self, labels={NODE_ID: f"in({', '.join(node_ids)})", **self.labels})

    def __str__(self) -> str:
        parts = [*_amounts(self.resources), *_selectors(self.labels)]
        return ", ".join(parts) if parts else "nothing"


def can_take(wanted: Wanted, node: Node) -> bool:
    return is_met(wanted.labels, node.labels) and _covers(node.free, wanted.resources)


def why_pending(wanted: Wanted, nodes: Sequence[Node]) -> str:
    """What stands between a worker and its place."""
    if not nodes:
        return "Ray has no nodes"
    suitable = [node for node in nodes if is_met(wanted.labels, node.labels)]
    if not suitable:
        labelled = [f"{node.address} has {_in_words(_own_labels(node))}" for node in nodes]
        return f"no node has {', '.join(_selectors(wanted.labels))} ({_few(labelled)})"
    large_enough = [node for node in suitable if _covers(node.total, wanted.resources)]
    if not large_enough:
        sizes = [f"{node.address} has {_of(wanted.resources, node.total)}" for node in suitable]
        return f"no {'such ' if wanted.labels else ''}node is large enough ({_few(sizes)})"
    if not any(_covers(node.free, wanted.resources) for node in large_enough):
        left = [f"{node.address} has {_left(wanted.resources, node)}" for node in large_enough]
        return f"the nodes that could take it are full ({_few(left)})"
    return "there is room for it now"


@dataclass(frozen=True, slots=True)
class Assignment:
    # Each worker's node; None for those that find no room.
    places: tuple[Node | None, ...]
    # The nodes as they are then.
    nodes: tuple[Node, ...]


def assign(workers: Iterable[Wanted], nodes: Sequence[Node]) -> Assignment:
    """All workers at once, in this order, each on the first node that can take it."""
    left = {node.node_id: node for node in nodes}
    places: list[Node | None] = []
    for wanted in workers:
        place = next((node for node in left.values() if can_take(wanted, node)), None)
        if place is not None:
            free = {name: amount - wanted.resources.get(name, 0.0) for name, amount in place.free.items()}
            left[place.node_id] = replace(place, free=free)
        places.append(place)
    return Assignment(tuple(places), tuple(left.values()))


def _covers(amounts: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    # Ray counts in ten-thousandths.
    return all(amounts.get(name, 0.0) >= amount - 1e-5 for name, amount in wanted.items())


def _amounts(amounts: Mapping[str, float]) -> list[str]:
    return [f"{name} {_number(name, amount)}" for name, amount in amounts.items()]


def _number(name: str, amount: float) -> str:
    return f"{amount / 2**30:.1f}GiB" if name == "memory" else f"{amount:g}"


def _selectors(labels: Mapping[str, str]) -> list[str]:
    return ["the node of pdserve up" if key == NODE_ID else f"{key}={value}" for key, value in labels.items()]


def _own_labels(node: Node) -> dict[str, str]:
    return {key: value for key, value in node.labels.items() if key != NODE_ID}


def _in_words(labels: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in labels.items()) or "no labels"


def _of(wanted: Mapping[str, float], amounts: Mapping[str, float]) -> str:
    return ", ".join(_amounts({name: amounts.get(name, 0.0) for name in wanted}))


def _left(wanted: Mapping[str, float], node: Node) -> str:
    parts = []
    for name in wanted:
        free, total = node.free.get(name, 0.0), node.total.get(name, 0.0)
        parts.append(f"{name} {_number(name, free)} of {_number(name, total)} free")
    return ", ".join(parts)


def _few(nodes: Sequence[str]) -> str:
    more = len(nodes) - _MAX_NODES_NAMED
    return "; ".join(nodes[:_MAX_NODES_NAMED]) + (f"; and {more} more" if more > 0 else "")
