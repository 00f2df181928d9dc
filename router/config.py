"""What a router is told at its start. Read once; nothing below looks into files or the environment."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from observability.config import ObservabilityConfig
from router.access.settings import ApiKeySource, TlsFiles, lacks, refuse_open
from router.bind import is_loopback
from trust.trust import TrustFiles

PositiveInt = Annotated[int, Field(gt=0)]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


MAX_REPLICAS = 16


class QueueOrder(Enum):
    """Who leaves the router's queue next."""

    FCFS = "fcfs"
    # By prompt tokens that no cache is known to have.
    SHORTEST = "shortest"


class RouterSettings(BaseModel):
    """What a user may set: the `router` section of the cluster's YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    grpc: str = "127.0.0.1:50051"
    # None: no HTTP is served.
    http: str | None = None
    # Routers of the same pools. The first has these ports, each further one the next.
    replicas: Annotated[int, Field(gt=0, le=MAX_REPLICAS)] = 1
    # Names, without a port, under which HTTP answers besides addresses and localhost. Where it listens beyond
    # loopback and there are none: any.
    http_hosts: tuple[HostName, ...] = ()
    # None: nothing is encrypted.
    tls: TlsFiles | None = None
    # None: whoever reaches the ports may do everything.
    api_keys: ApiKeySource | None = None
    # Whether the ports may be open to a network without the two.
    insecure: bool = False
    # Of gRPC. A connection's further calls wait for one of these to end.
    max_streams_per_connection: PositiveInt = 1024
    max_queued_requests: PositiveInt = 256
    queue_order: QueueOrder = QueueOrder.FCFS
    # Of SHORTEST: a prompt counts for less the longer it waits, and for nothing from here on.
    queue_aging_s: PositiveSeconds = 30.0
    # Prompt tokens that may be out at one prefill worker. A longer prompt goes to one with nothing out.
    prefill_backlog_tokens: PositiveInt = 4096
    # The time limit of a request whose client set none.
    default_timeout_s: PositiveSeconds = 300.0
    max_prompt_bytes: PositiveInt = 4 << 20
    max_n: PositiveInt = 16
    # How often one sequence may lose its workers before its client is told.
    retry_budget: Annotated[int, Field(ge=0)] = 3
    # For the short calls to a worker: Reserve and Release.
    worker_timeout_s: PositiveSeconds = 5.0
    # A worker that shows no sign of life for so long gets no new work, and loses what it has to others.
    suspect_after_s: PositiveSeconds = 5.0
    # Tokens of all requests together that clients have not read yet. Beyond it the slowest are cut off.
    max_unread_tokens: PositiveInt = 131072
    # How long requests in flight may still take after SIGTERM.
    drain_s: Annotated[float, Field(ge=0)] = 5.0

    @model_validator(mode="after")
    def _is_closed(self) -> RouterSettings:
        if not self.insecure:
            refuse_open(self.addresses(), self.tls, self.api_keys)
        return self

    @property
    def is_guarded(self) -> bool:
        """Whether something has to be shown at the ports."""
        return self.tls is not None or self.api_keys is not None

    def open_addresses(self) -> list[str]:
        """What `insecure: true` has done, a line for each address that is reached from elsewhere."""
        lacking = lacks(self.tls, self.api_keys)
        return [
            f"router.{key}: {address} is open to the network, without {lacking}"
            for key, address in self.all_addresses()
            if lacking and not is_loopback(address.rpartition(":")[0])
        ]

    def settled(self) -> RouterSettings:
        """The same for a process that runs elsewhere: nothing from the environment. (Paths are whole.)"""
        keys = None if self.api_keys is None else self.api_keys.settled()
        return self.model_copy(update={"api_keys": keys})

    def addresses(self) -> dict[str, str]:
        """Where the router listens, by the setting that says so."""
        return {"grpc": self.grpc} | ({} if self.http is None else {"http": self.http})

    def replica(self, index: int) -> RouterSettings:
        """With its own ports: those of the first, counted on."""
        ports = {key: _counted_on(address, index) for key, address in self.addresses().items()}
        return self.model_copy(update=ports)

    def all_addresses(self) -> list[tuple[str, str]]:
        """Of all replicas, each with the setting that says so."""
        return [each for index in range(self.replicas) for each in self.replica(index).addresses().items()]

    def named_addresses(self) -> list[tuple[str, str]]:
        """The same; those that no setting names, since they are counted on, with their router's id."""
        further = [
            (f"{key} of router-{index}", address)
            for index in range(1, self.replicas)
            for key, address in self.replica(index).addresses().items()
        ]
        return [*self.addresses().items(), *further]


def _counted_on(address: str, index: int) -> str:
    """ "127.0.0.1:50051", 1 → "127.0.0.1:50052". What is no address stays what it is."""
    host, colon, port = address.rpartition(":")
    return f"{host}{colon}{int(port) + index}" if port.isascii() and port.isdecimal() else address


class RouterConfig(RouterSettings):
    """The settings and who this router is: the file behind `python -m router --config`."""

    cluster: str
    router_id: str
    # What workers know it by, where another process has its id still.
    instance_id: str | None = None
    # The name under which clients know the model.
    model: str
    # tokenizer.json, config.json and, where there are any, generation_config.json and a chat template.
    model_dir: Path
    # Where the controller serves Control; or the file in which each one that comes says so.
    control: str | None = None
    control_file: Path | None = None
    # A Unix socket at which gRPC is served without keys and TLS: for the user whose folder it lies in.
    local_socket: Path | None = None
    # By what the other parts of the cluster know it, and it them.
    trust: TrustFiles
    observability: ObservabilityConfig = ObservabilityConfig()
    # The cluster's own limit; None: the model's.
    max_model_len: PositiveInt | None = None

    @model_validator(mode="after")
    def _knows_a_controller(self) -> RouterConfig:
        if (self.control is None) == (self.control_file is None):
            raise ValueError("name control or control_file")
        return self


def read_config(path: Path) -> RouterConfig:
    """Raises pydantic.ValidationError (with the key's path) or OSError."""
    return RouterConfig.model_validate_json(path.read_bytes())
