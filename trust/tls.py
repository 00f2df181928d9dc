"""Mutual TLS between the parts: certificates of the cluster's own authority, for the cluster's name.

Addresses are not in it: workers listen wherever Ray places them.
"""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from trust.errors import TrustError

# More than any handshake takes.
_MAX_ROUNDS = 20


class MutualTls(BaseModel):
    """PEM files, at these paths on every node of the cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Who may sign certificates of this cluster's parts: an authority for nothing else.
    ca: Path
    cert: Path
    key: Path
    # The DNS name that every certificate must be for.
    name: str = Field(default="pdserve", min_length=1)

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Authority, certificate, key, as this process found them first. Raises TrustError, which names the
        setting."""
        return _contents(self)

    def absolute(self) -> MutualTls:
        """For processes that run elsewhere. Links stay: on another node they may lead to another file."""
        paths = {"ca": self.ca, "cert": self.cert, "key": self.key}
        return self.model_copy(update={name: path.expanduser().absolute() for name, path in paths.items()})

    def check(self) -> None:
        """Whether two parts that have these files would let each other in, tried by a handshake in memory.

        Raises TrustError, which begins with the setting that is wrong.
        """
        self.read()
        ends = self._end(ssl.PROTOCOL_TLS_SERVER), self._end(ssl.PROTOCOL_TLS_CLIENT)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = ends[0].wrap_bio(to_server, to_client, server_side=True)
        client = ends[1].wrap_bio(to_client, to_server, server_hostname=self.name)
        try:
            _shake_hands(client, server)
        except ssl.SSLCertVerificationError as error:
            raise TrustError(f"cert: {self.cert} is refused: {error.verify_message}") from error
        except ssl.SSLError as error:
            raise TrustError(f"cert: {self.cert} cannot be used: {error.reason}") from error

    def _end(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise TrustError(f"ca: {self.ca} holds no certificate: {error.reason}") from error
        try:
            context.load_cert_chain(self.cert, self.key, password=self._no_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise TrustError(f"key: {self.key} does not belong to {self.cert}") from error
            raise TrustError(f"cert: {self.cert} with {self.key} cannot be used: {error.reason}") from error
        return context

    def _no_password(self) -> str:
        raise TrustError(f"key: {self.key} wants a password, and nobody is there to give it")


@cache
def _contents(files: MutualTls) -> tuple[bytes, bytes, bytes]:
    return _read("ca", files.ca), _read("cert", files.cert), _read("key", files.key)


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TrustError(f"{setting}: {path} cannot be read: {error.strerror}") from error


def _shake_hands(client: ssl.SSLObject, server: ssl.SSLObject) -> None:
    """Raises ssl.SSLError."""
    waiting = [client, server]
    for _ in range(_MAX_ROUNDS):
        for end in tuple(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
        if not waiting:
            return
    raise ssl.SSLError(0, "the handshake does not end")
