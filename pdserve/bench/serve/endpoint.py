"""Where an OpenAI-compatible server is, and how it is asked."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from pdserve.bench.errors import BenchError


class Api(Enum):
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url` is the server's, with or without /v1. `model` None: the first that it lists."""

    url: str
    api: Api = Api.COMPLETIONS
    model: str | None = None
    api_key: str | None = None
    # Put into every request's body, over what stands there.
    extra: Mapping[str, object] = field(default_factory=dict)
    # Of https, PEM files: whose certificate the server must have (None: one of the system's CAs), and what is
    # shown where a server wants a certificate of its clients.
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    def tls(self) -> ssl.SSLContext:
        """Raises BenchError for a file that is none of these."""
        try:
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            raise BenchError(f"the certificates for {self.url} cannot be used: {error}") from error
        return context

    @property
    def path(self) -> str:
        return f"{self.base}/{'completions' if self.api is Api.COMPLETIONS else 'chat/completions'}"
