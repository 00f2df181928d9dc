"""`pdserve check`: what a configuration needs, against what there is. Starts nothing, loads no weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from cluster.config import ClusterConfig
from cluster.errors import ClusterError, PartError
from cluster.folders import refuse_strangers, with_absolute_paths
from cluster.launch import refuse_a_taken_port
from cluster.nodes.local_ray import QUIET
from cluster.nodes.machine import memory_bytes, num_cores
from cluster.nodes.memory import CONTROL_BYTES, OWN_RAY_BYTES, ROUTER_BYTES, WorkerEstimate, estimate
from cluster.nodes.network import LOOPBACK
from cluster.nodes.placement import Node, Wanted, assign, why_pending
from cluster.preflight import refuse_tls
from cluster.state import read_record
from engine.errors import ModelError, NativeUnavailable
from engine.model_facts import ModelFacts, gpu_memory_bytes, locate_model, read_facts
from engine.native.requirements import check_machine
from router.access.certificates import days_left, why_not_for
from router.config import RouterSettings
from router.text.model_folder import ModelFolderError, read_model_folder
from worker.identity import Role

THIS_MACHINE = "this machine"
_SOON_DAYS = 14


class Severity(Enum):
    ERROR = "error"  # `up` would fail, or its workers would
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    message: str


@dataclass(frozen=True, slots=True)
class NodeMemory:
    address: str
    num_workers: int
    needed_bytes: int
    memory_bytes: int


@dataclass(slots=True)
class Report:
    name: str
    # Whose nodes the configuration was held against.
    nodes_of: str = THIS_MACHINE
    facts: ModelFacts | None = None
    # One for each pool.
    workers: list[tuple[int, WorkerEstimate]] = field(default_factory=list)
    memory: list[NodeMemory] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    def add(self, severity: Severity, message: str) -> None:
        self.findings.append(Finding(severity, message))


def check(config: ClusterConfig) -> Report:
    report = Report(config.name)
    nodes = _find_nodes(config, report)
    _check_surroundings(config, report)
    _read_model(config, report)
    if report.facts is not None:
        _estimate_workers(config, report.facts, report)
    _check_kernels(config, report)
    places = _check_places(config, nodes, report)
    _check_memory(config, places, nodes, report)
    return report


# -- what there is ------------------------------------------------------------------------------------


def _find_nodes(config: ClusterConfig, report: Report) -> list[Node]:
    if config.ray.address == "local":
        return [_this_machine(config)]
    os.environ.update(QUIET)
    from cluster.actors.handles import bind_here, connected  # Ray is loaded only where it is needed
    from cluster.nodes.ray_nodes import ray_nodes

    try:
        with connected(config.ray.address):
            nodes = ray_nodes()
            with _finding(report, PartError):
                bind_here(config)
    except PartError as error:
        report.add(Severity.WARNING, f"{str(error).rstrip('.')}: checked against {THIS_MACHINE} instead")
        return [_this_machine(config)]
    report.nodes_of = f"the Ray at {config.ray.address} ({len(nodes)} node{'s' * (len(nodes) != 1)})"
    return nodes


def _this_machine(config: ClusterConfig) -> Node:
    """As a Ray of our own would count it."""
    memory = float(memory_bytes())
    amounts = {"CPU": float(config.ray.num_cpus), "GPU": float(len(gpu_memory_bytes())), "memory": memory}
    return Node("here", LOOPBACK, amounts, amounts)


def _check_surroundings(config: ClusterConfig, report: Report) -> None:
    with _finding(report, ClusterError):
        refuse_strangers()
    with _finding(report, ClusterError):
        with_absolute_paths(config)
    with _finding(report, ClusterError):
        refuse_tls(config)
    _check_front(config.router, report)
    _check_ports(config, report)


def _check_front(router: RouterSettings, report: Report) -> None:
    for told in router.open_addresses():
        report.add(Severity.WARNING, told)
    if router.tls is not None and (days := days_left(router.tls.cert)) < _SOON_DAYS:
        told = f"{str(router.tls.cert)!r} expires in {days} days; a new one there is taken at once"
        report.add(Severity.WARNING, f"router.tls.cert: {told}")
    hosts = [address.rpartition(":")[0].strip("[]") for address in router.addresses().values()]
    if router.tls is not None and (told := why_not_for(router.tls.cert, hosts)):
        report.add(Severity.WARNING, f"router.tls.cert: {str(router.tls.cert)!r} {told}")


def _check_ports(config: ClusterConfig, report: Report) -> None:
    """A cluster that runs may be checked, to see whether a changed file will do: the ports are its own."""
    severity = Severity.ERROR
    with _finding(report, ClusterError):
        record = read_record(config.name)
        if record is not None:
            record.refuse_elsewhere()
        if record is not None and record.is_running():
            severity = Severity.WARNING
            report.add(
                severity,
                f'the cluster "{config.name}" runs already: `up` works after pdserve down {config.name}',
            )
    for key, listening in config.router.named_addresses():
        with _finding(report, ClusterError, severity):
            refuse_a_taken_port(key, listening)


def _read_model(config: ClusterConfig, report: Report) -> None:
    with _finding(report, ModelError, where="model: "):
        path = locate_model(config.model.id)
        if path is None:
            report.add(
                Severity.WARNING,
                f"model: {config.model.id} is not on this machine; `up` would look for it on the hub. "
                "Neither the model nor the memory it takes is checked",
            )
            return
        with _finding(report, ModelError, where="model: "):
            report.facts = read_facts(path, config.model.max_model_len)
        if path.is_dir():
            with _finding(report, ModelFolderError, where="model: "):
                read_model_folder(path)


@contextmanager
def _finding(
    report: Report, kind: type[Exception], severity: Severity = Severity.ERROR, where: str = ""
) -> Iterator[None]:
    """Goes on where the part inside has found something."""
    try:
        yield
    except kind as error:
        report.add(severity, f"{where}{error}")


# -- what it needs ------------------------------------------------------------------------------------


def _estimate_workers(config: ClusterConfig, facts: ModelFacts, report: Report) -> None:
    for role, pool in config.pools.by_role().items():
        device = "cuda" if config.is_on_gpu(pool) else "cpu"
        each = estimate(role, pool, facts, config.model.dtype, device)
        report.workers.append((pool.replicas, each))
        where = f"pools.{role.value}.engine"
        max_model_len = pool.engine.max_model_len or config.model.max_model_len or facts.context
        if each.num_blocks == 0:
            report.add(Severity.ERROR, f"{where}: kv_cache is smaller than one block")
        elif max_model_len is not None and each.num_tokens < max_model_len:
            report.add(
                Severity.WARNING,
                f"{where}: its KV pool holds {each.num_tokens} tokens; a request of the full context of "
                f"{max_model_len} is refused",
            )
    dtypes = {each.role.value: each.dtype for _, each in report.workers}
    if len(set(dtypes.values())) > 1:
        told = ", ".join(f"{role} {dtype}" for role, dtype in dtypes.items())
        report.add(
            Severity.ERROR, f"pools hand KV to each other and differ in dtype ({told}): set model.dtype"
        )


def _check_kernels(config: ClusterConfig, report: Report) -> None:
    """Whether workers on CPUs would have our kernels. Other nodes may have what this machine lacks."""
    if config.model.compile == "off":
        return
    dtypes: set[str | None] = {each.dtype for _, each in report.workers if each.device == "cpu"}
    if not report.workers and any(not config.is_on_gpu(pool) for pool in config.pools.by_role().values()):
        dtypes = {None if config.model.dtype == "auto" else config.model.dtype}
    try:
        for dtype in dtypes:
            check_machine(dtype)
    except NativeUnavailable as error:
        if config.model.compile == "auto":
            told = "CPU workers run on torch alone, at about half the speed, without our kernels"
            report.add(Severity.NOTE, f"model.compile: {told}: {error}")
            return
        is_final = config.ray.address == "local"
        report.add(
            Severity.ERROR if is_final else Severity.WARNING,
            f"model.compile: on was asked for, and the kernels cannot be had"
            f"{'' if is_final else ' on this machine'}: {error}",
        )


def _check_places(
    config: ClusterConfig, nodes: Sequence[Node], report: Report
) -> list[tuple[Role, Node | None]]:
    wanted = [
        (role, Wanted.by(pool)) for role, pool in config.pools.by_role().items() for _ in range(pool.replicas)
    ]
    assignment = assign((each for _, each in wanted), nodes)
    places = [(role, place) for (role, _), place in zip(wanted, assignment.places, strict=True)]
    for role, pool in config.pools.by_role().items():
        num_left = sum(place is None for of, place in places if of is role)
        if num_left:
            asked = Wanted.by(pool)
            report.add(
                Severity.ERROR,
                f"pools.{role.value}: {num_left} of {pool.replicas} workers find no place on "
                f"{report.nodes_of}: wants {asked}; {why_pending(asked, assignment.nodes)}",
            )
    num_threads = sum(pool.replicas * pool.threads for pool in config.pools.by_role().values())
    if report.nodes_of == THIS_MACHINE and num_threads > (cores := num_cores()):
        report.add(Severity.NOTE, f"{num_threads} threads of all workers share {cores} cores")
    has_gpus = any(node.total.get("GPU") for node in nodes)
    for role, pool in config.pools.by_role().items():
        if has_gpus and config.model.device == "auto" and not config.is_on_gpu(pool):
            told = "asks for no GPU (resources.num_gpus), and computes on the CPU"
            report.add(Severity.NOTE, f"pools.{role.value}: {told}")
    return places


def _check_memory(
    config: ClusterConfig, places: Iterable[tuple[Role, Node | None]], nodes: Sequence[Node], report: Report
) -> None:
    by_role = {each.role: each for _, each in report.workers}
    if not by_role:
        return
    placed = [(by_role[role], place) for role, place in places if place is not None]
    shared = CONTROL_BYTES + (config.router.replicas - 1) * ROUTER_BYTES
    shared += OWN_RAY_BYTES if config.ray.address == "local" else 0
    for node in nodes:
        here = [each for each, place in placed if place is not None and place.node_id == node.node_id]
        # On the first node are the controller and the router too.
        needed = sum(each.host_bytes for each in here) + (shared if node is nodes[0] else 0)
        memory = int(node.total.get("memory", 0))
        report.memory.append(NodeMemory(node.address, len(here), needed, memory))
        if memory and needed > memory:
            report.add(
                Severity.ERROR,
                f"memory: {len(here)} workers on {node.address} need {_gib(needed)} in all, and it has "
                f"{_gib(memory)}: lower engine.kv_cache or replicas",
            )
    if report.nodes_of == THIS_MACHINE:
        _check_gpus(by_role.values(), report)


def _check_gpus(
    workers: Iterable[WorkerEstimate], report: Report, memory: Callable[[], Sequence[int]] = gpu_memory_bytes
) -> None:
    on_gpu = [each for each in workers if each.device == "cuda"]
    sizes = memory() if on_gpu else ()
    for each in on_gpu:
        if not sizes:
            report.add(
                Severity.ERROR, f"pools.{each.role.value}: torch finds no CUDA device on {THIS_MACHINE}"
            )
        elif each.device_bytes > min(sizes):
            report.add(
                Severity.ERROR,
                f"pools.{each.role.value}: a worker needs {_gib(each.device_bytes)} of GPU memory, and "
                f"there are {_gib(min(sizes))}: lower engine.kv_cache",
            )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
