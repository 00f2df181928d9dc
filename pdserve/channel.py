"""A client's channel to a router: in the clear, or by TLS; and the key that each call shows."""

from __future__ import annotations

import ipaddress
import json
import socket
from dataclasses import dataclass, field
from pathlib import Path

import grpc

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A router whose host is gone closes no connection.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)
# Of several addresses, not all calls to the first that answers.
_IN_TURN = ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]}))


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a router may want to see of a client, and what a client wants to see of it. Files are PEM."""

    api_key: str | None = field(default=None, repr=False)
    # By the CAs that gRPC knows, if `ca` names no other.
    tls: bool = False
    ca: Path | None = None
    # The client's own certificate, for a router with `tls.client_ca`.
    cert: Path | None = None
    key: Path | None = None
    # For whom the router's certificate must be, in place of the address that is dialled.
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a client's certificate and its key go together: give cert and key")

    @property
    def is_tls(self) -> bool:
        return self.tls or self.ca is not None or self.cert is not None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)


def open_channel(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """Raises OSError for a file that cannot be read."""
    # A proxy in the environment is for the world outside, and this machine is none of it.
    proxy = (("grpc.enable_http_proxy", 0),) if _is_here(address) else ()
    several = (_IN_TURN,) if "," in address else ()
    options = (*_OPTIONS, *several, *proxy)
    if not credentials.is_tls:
        return grpc.aio.insecure_channel(address, options=options)
    tls = grpc.ssl_channel_credentials(
        *(
            None if path is None else path.read_bytes()
            for path in (credentials.ca, credentials.key, credentials.cert)
        )
    )
    if credentials.server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", credentials.server_name))
    return grpc.aio.secure_channel(address, tls, options=options)


def _is_here(address: str) -> bool:
    """Whether it is one of this machine's, all of them (0.0.0.0) included. Asks nobody for a name."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except ValueError:
        return host == "localhost"
    except OSError:
        return False
    return True
