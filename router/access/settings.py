"""What the `router` section of the cluster's YAML says about who may come in. Files are read when the
configuration is: what could not be served with is refused there, by the key's own name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_validator,
)

from router.access.certificates import check_authorities, check_certificates, check_key, read_file
from router.access.keys import ApiKey, parse_keys
from router.bind import is_loopback

_ADVICE = (
    "set router.tls and router.api_keys (docs/security.md), or write insecure: true where the network is safe"
)


class _Section(BaseModel):
    # Somebody may have put a key where its hash belongs: errors do not repeat it.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _absolute(path: Path) -> Path:
    """Meant from where the configuration is read, like its folders; so errors name the place."""
    return path.expanduser().absolute()


class TlsFiles(_Section):
    """PEM files, of gRPC and HTTP alike. A changed certificate is used for the connections that come then."""

    # The router's own certificate first, then those between it and its CA.
    cert: Annotated[Path, AfterValidator(_absolute), AfterValidator(check_certificates)]
    key: Annotated[Path, AfterValidator(_absolute)]
    # Clients must show a certificate of one of these.
    client_ca: Annotated[Path, AfterValidator(_absolute), AfterValidator(check_authorities)] | None = None

    @field_validator("key")
    @classmethod
    def _fits(cls, key: Path, info: ValidationInfo) -> Path:
        cert = info.data.get("cert")
        return key if cert is None else check_key(key, cert)


def _checked_file(path: Path) -> Path:
    try:
        parse_keys(read_file(path).decode(errors="replace").splitlines())
    except ValueError as error:
        named = str(error) if repr(str(path)) in str(error) else f"{str(path)!r}: {error}"
        raise ValueError(named) from error
    return path


def _checked_variable(name: str) -> str:
    _read_variable(name, os.environ)
    return name


def _read_variable(name: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Raises ValueError."""
    if name not in environment:
        raise ValueError(f"the environment has no {name!r}")
    lines = tuple(environment[name].replace(";", "\n").splitlines())
    try:
        parse_keys(lines)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from error
    return lines


def _as_lines(value: object) -> object:
    """A block of YAML is as good as a list."""
    return tuple(value.splitlines()) if isinstance(value, str) else value


def _checked_lines(lines: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if lines is not None:
        parse_keys(lines)
    return lines


class ApiKeySource(_Section):
    """Where the lines are that `pdserve key new` prints: one of these."""

    # Read again when it changes.
    file: Annotated[Path, AfterValidator(_absolute), AfterValidator(_checked_file)] | None = None
    # The variable's name where `up` runs; `;` may stand between its lines.
    env: Annotated[str, AfterValidator(_checked_variable)] | None = None
    keys: Annotated[tuple[str, ...] | None, AfterValidator(_checked_lines), BeforeValidator(_as_lines)] = None

    @model_validator(mode="after")
    def _is_one(self) -> ApiKeySource:
        if sum(value is not None for _, value in self) != 1:
            raise ValueError("name one of file, env and keys")
        return self

    def settled(self) -> ApiKeySource:
        """The same keys for a process elsewhere, with another environment."""
        if self.env is not None:
            return ApiKeySource(keys=_read_variable(self.env, os.environ))
        return self

    def read(self) -> tuple[ApiKey, ...]:
        """Of one that is settled. Raises ValueError."""
        if self.file is not None:
            return parse_keys(read_file(self.file).decode(errors="replace").splitlines())
        return parse_keys(self.keys or ())


def lacks(tls: TlsFiles | None, keys: ApiKeySource | None) -> str:
    """What an address that is open to a network should have; "": it has all."""
    is_known = keys is not None or (tls is not None and tls.client_ca is not None)
    has = {"encryption": tls is not None, "keys": is_known}
    return " and ".join(what for what, is_there in has.items() if not is_there)


def refuse_open(addresses: Mapping[str, str], tls: TlsFiles | None, keys: ApiKeySource | None) -> None:
    """Addresses beyond loopback want encryption, and callers who are known. Raises ValueError."""
    lacking = lacks(tls, keys)
    for name, address in addresses.items():
        host = address.rpartition(":")[0]
        # One that is no address at all is refused as such.
        if not lacking or not host or "/" in host or is_loopback(host):
            continue
        if tls is None:
            raise ValueError(f"{name}: {address} is open to the network without encryption: {_ADVICE}")
        told = "for everybody who reaches it, Admin included: set router.api_keys or router.tls.client_ca"
        raise ValueError(f"{name}: {address} is open {told}, or write insecure: true")
