"""What servers of gRPC really serve: every one that is made meanwhile, with the table of its handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import pytest
from grpc._utilities import DictionaryGenericHandler


class Server(Protocol):
    """What both kinds have."""

    add_generic_rpc_handlers: Callable[[Iterable[grpc.GenericRpcHandler]], None]
    add_insecure_port: Callable[[str], int]
    add_secure_port: Callable[[str, grpc.ServerCredentials], int]


@dataclass
class Served:
    """One server. `methods` is every path that it has a handler for."""

    methods: set[str] = field(default_factory=set)
    ports: list[int] = field(default_factory=list)


class Record:
    """All servers that are made after it, by whatever part, in either of gRPC's ways."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers: list[Served] = []
        for module in (grpc, grpc.aio):
            monkeypatch.setattr(module, "server", self._noting(module.server))

    def _noting(self, make: Callable[..., Server]) -> Callable[..., Server]:
        def noting(*given: object, **options: object) -> Server:
            server = make(*given, **options)
            self._note(server)
            return server

        return noting

    def _note(self, server: Server) -> None:
        served = Served()
        self.servers.append(served)
        take, insecure, secure = (
            server.add_generic_rpc_handlers,
            server.add_insecure_port,
            server.add_secure_port,
        )

        def add_handlers(handlers: Iterable[grpc.GenericRpcHandler]) -> None:
            handlers = tuple(handlers)
            for handler in handlers:
                # Of another kind it would not be known what it serves.
                assert isinstance(handler, DictionaryGenericHandler), handler
                served.methods.update(handler._method_handlers)
            take(handlers)

        def add_insecure_port(address: str) -> int:
            served.ports.append(port := insecure(address))
            return port

        def add_secure_port(address: str, credentials: grpc.ServerCredentials) -> int:
            served.ports.append(port := secure(address, credentials))
            return port

        server.add_generic_rpc_handlers = add_handlers
        server.add_insecure_port = add_insecure_port
        server.add_secure_port = add_secure_port
