"""What a cluster is made of: the models behind the YAML file.

Defaults live here and, for the parts, in their own settings (engine.config, router.config).
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, model_validator

from cluster.nodes.labels import checked_selector
from engine.config import ByteSize, EngineConfig, ModelConfig
from observability.config import ObservabilityConfig
from router.config import RouterSettings
from trust.tls import MutualTls
from worker.identity import Role

# Of one pool, by whatever way they are asked for: a slip of the finger shall not start a million.
MAX_WORKERS = 1024
# 30 days. To gRPC, which counts nanoseconds in 64 bits, `.inf` is over at once.
_LONGEST_START_S = 30 * 86400
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_ADDRESS = re.compile(r"(?P<host>[^\s:/]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")


def _checked_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a name; use lower-case letters, digits and dashes, 32 at most")
    return name


def split_address(address: str) -> tuple[str, int]:
    """ "127.0.0.1:50051" → ("127.0.0.1", 50051). Raises ValueError."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(f"{address!r} is not host:port, like 127.0.0.1:50051")
    return match["host"].strip("[]"), int(match["port"])


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Resources(_Section):
    """Ray's logical resources for one worker: where it is placed and how many fit, not what it uses."""

    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    memory: ByteSize | None = None
    # Resources that the nodes were given by name.
    custom: dict[str, float] = Field(default_factory=dict)


class RuntimeEnv(_Section):
    """What Ray brings to a node before a worker starts there, in Ray's own words."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    # The folder (or the URI of a .zip) that the worker runs in and imports from first.
    working_dir: str | None = None
    # More packages to import: folders, .whl files or URIs.
    py_modules: tuple[str, ...] = ()
    # What of the folders stays here, as in .gitignore, which counts too.
    excludes: tuple[str, ...] = ()
    # Requirements that pip installs on top of what the node has.
    pip: tuple[str, ...] = ()
    env_vars: dict[str, str] = Field(default_factory=dict)


class PoolConfig(_Section):
    """Workers of one role, all alike."""

    replicas: StrictInt = Field(default=1, ge=0, le=MAX_WORKERS)
    # Cores that a worker's arithmetic really uses.
    threads: StrictInt = Field(default=1, gt=0)
    resources: Resources = Resources()
    # Ray's name of the accelerator that the node must have: "H100", "L4".
    accelerator_type: Annotated[str, AfterValidator(checked_selector)] | None = None
    # Labels that the node must have: {zone: a}, or Ray's "!a", "in(a, b)", "!in(a, b)".
    node_labels: dict[str, Annotated[str, AfterValidator(checked_selector)]] = Field(default_factory=dict)
    runtime_env: RuntimeEnv = RuntimeEnv()
    engine: EngineConfig = EngineConfig()
    # Placed, model loaded, ready: a worker that takes longer has failed.
    start_timeout_s: float = Field(default=180.0, gt=0, le=_LONGEST_START_S)


def _speculates_not(pool: PoolConfig | None) -> PoolConfig | None:
    if pool is not None and pool.engine.speculative is not None:
        raise ValueError(
            "engine.speculative has no meaning here: a prefill worker draws one token a sequence; "
            "set it for the decode or the colocated pool"
        )
    return pool


class Pools(_Section):
    """Prefill and decode, or colocated (both phases in one worker), or all three."""

    prefill: Annotated[PoolConfig | None, AfterValidator(_speculates_not)] = None
    decode: PoolConfig | None = None
    colocated: PoolConfig | None = None

    @model_validator(mode="after")
    def _serves_requests(self) -> Pools:
        if self.prefill is None and self.decode is None and self.colocated is None:
            raise ValueError("there is no pool; name prefill and decode, or colocated")
        if self.prefill is None and self.decode is not None:
            raise ValueError("decode workers need prefill workers: add a prefill pool")
        if self.decode is None and self.prefill is not None:
            raise ValueError("prefill workers need decode workers: add a decode pool")
        return self

    @model_validator(mode="after")
    def _blocks_fit(self) -> Pools:
        sizes = {role.value: pool.engine.block_size for role, pool in self.by_role().items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"pools hand blocks to each other, so engine.block_size must be one: {sizes}")
        return self

    def by_role(self) -> dict[Role, PoolConfig]:
        pools = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.COLOCATED: self.colocated}
        return {role: pool for role, pool in pools.items() if pool is not None}


class TransportName(Enum):
    AUTO = "auto"
    SHM = "shm"
    COLLECTIVE = "collective"
    GRPC = "grpc"


def _checked_transport(value: object) -> object:
    names = [transport.value for transport in TransportName]
    if isinstance(value, str) and value not in names:
        raise ValueError(f"this version has no transport {value!r}; there are: {', '.join(names)}")
    return value


class KVTransferConfig(_Section):
    """How KV travels from prefill to decode workers."""

    # auto: the fastest that both workers can use | shm: the prefill worker writes the decode worker's memory
    # (CPU pools on one host) | collective: by torch.distributed, Gloo between CPU pools, NCCL between GPUs
    # (which is unverified) | grpc: over the network.
    transport: Annotated[TransportName, BeforeValidator(_checked_transport)] = TransportName.AUTO
    # What a decode worker checks. checksum: each frame | full: besides, what then lies in its blocks | off |
    # auto: checksum over a wire, off where the prefill worker writes the decode worker's memory.
    verify: Literal["auto", "off", "checksum", "full"] = "auto"
    # Whether `auto` may use collective between hosts: its sockets have neither TLS nor authentication.
    trusted_network: bool = False


class NetworkConfig(_Section):
    """Where workers listen: for routers, for each other's KV and for the controller.

    loopback: on their node only | node: on their node's address, so that other nodes reach them |
    auto: loopback, and a Ray that spans several addresses is refused.
    """

    bind: Literal["auto", "loopback", "node"] = "auto"
    # Of all that router, controller and workers say to each other. None: in the clear.
    tls: MutualTls | None = None
    # Whether that may be, on a network that is trusted.
    insecure: bool = False

    @model_validator(mode="after")
    def _is_closed(self) -> NetworkConfig:
        if self.bind == "node" and self.tls is None and not self.insecure:
            raise ValueError(
                "bind: node lets workers speak over the network. Encrypt that by tls: {ca, cert, key} (see "
                "docs/security.md), or write insecure: true where the network is trusted"
            )
        return self


def _checked_ray_address(address: str) -> str:
    if address not in ("local", "auto"):
        split_address(address)
    return address


class RayConfig(_Section):
    """local: start one here | auto: the one that runs here | host:port of one that runs."""

    address: Annotated[str, AfterValidator(_checked_ray_address)] = "local"
    # Logical CPUs of a Ray that we start: how far pools scale, not how many cores there are.
    num_cpus: StrictInt = Field(default=64, gt=0)


def _checked_router(router: RouterSettings) -> RouterSettings:
    taken: dict[str, str] = {}
    for key, address in router.named_addresses():
        try:
            split_address(address)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        first = taken.setdefault(address, key)
        if first != key:
            why = "" if router.replicas == 1 else ": each further router has the next ports, so leave room"
            raise ValueError(f"{first} and {key} are both {address}{why}")
    return router


def device_for(model: ModelConfig, pool: PoolConfig) -> ModelConfig:
    """The model as the workers of a pool hold it. From those of a pool that asks for no GPU, Ray does not
    hide the ones that it has given to others.
    """
    is_for_cpu = model.device == "auto" and not pool.resources.num_gpus
    return model.model_copy(update={"device": "cpu"}) if is_for_cpu else model


class ClusterConfig(_Section):
    """One cluster: the whole file."""

    name: Annotated[str, AfterValidator(_checked_name)]
    model: ModelConfig = ModelConfig()
    router: Annotated[RouterSettings, AfterValidator(_checked_router)] = RouterSettings()
    pools: Pools
    kv_transfer: KVTransferConfig = KVTransferConfig()
    network: NetworkConfig = NetworkConfig()
    ray: RayConfig = RayConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    def is_on_gpu(self, pool: PoolConfig) -> bool:
        """Whether the workers of a pool compute on one, as far as the file tells."""
        return device_for(self.model, pool).device != "cpu"
