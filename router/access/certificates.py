"""Certificates and their keys, as PEM files: whether they can be used, told before anything is served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

# Who listens there is reached by other addresses.
_EVERYWHERE = ("0.0.0.0", "::")


def read_file(path: Path) -> bytes:
    """Raises ValueError that names the file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error


def check_certificates(path: Path) -> Path:
    """Every one of a chain is of today. Raises ValueError."""
    for certificate in _read_certificates(path):
        _check_time(path, certificate)
    return path


def days_left(path: Path) -> int:
    """Until the first of a chain has expired. Raises ValueError."""
    end = min(certificate.not_valid_after_utc for certificate in _read_certificates(path))
    return (end - datetime.now(timezone.utc)).days


def why_not_for(path: Path, hosts: Iterable[str]) -> str:
    """What a client that checks names would miss in the certificate of a server at `hosts` (addresses or
    names); "": nothing. With any DNS name in it, it may be reached by that. Raises ValueError."""
    from cryptography.x509 import DNSName, ExtensionNotFound, IPAddress, SubjectAlternativeName

    nowhere = "is for no name and no address (subjectAltName): clients will not take it"
    try:
        found = _read_certificates(path)[0].extensions.get_extension_for_class(SubjectAlternativeName)
    except ExtensionNotFound:
        return nowhere
    if found.value.get_values_for_type(DNSName):
        return ""
    addresses = [str(address) for address in found.value.get_values_for_type(IPAddress)]
    if not addresses:
        return nowhere
    missing = sorted({host for host in hosts if host not in (*addresses, *_EVERYWHERE)})
    if not missing:
        return ""
    return f"is for {' and '.join(addresses)}: clients at {' or '.join(missing)} will not take it"


def check_authorities(path: Path) -> Path:
    """Of those in a bundle one is of today: others may have been left in it. Raises ValueError."""
    complaints: list[ValueError] = []
    for certificate in _read_certificates(path):
        try:
            _check_time(path, certificate)
        except ValueError as error:
            complaints.append(error)
        else:
            return path
    raise complaints[0]


def check_key(path: Path, cert: Path) -> Path:
    """It is that of the first certificate in `cert`, and has no passphrase. Raises ValueError."""
    # Loaded only where there is TLS.
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_private_key,
    )

    try:
        key = load_pem_private_key(read_file(path), password=None)
    except TypeError as error:
        raise ValueError(f"{str(path)!r} has a passphrase: nobody is there to type it at a start") from error
    except UnsupportedAlgorithm as error:
        raise ValueError(f"{str(path)!r}: {error}") from error
    except ValueError as error:
        if path.is_file():
            raise ValueError(f"{str(path)!r} holds no private key in PEM") from error
        raise
    own = _read_certificates(cert)[0]
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != own.public_key().public_bytes(*form):
        raise ValueError(f"{str(path)!r} is not the key of the certificate in {str(cert)!r}")
    return path


def _read_certificates(path: Path) -> Sequence[Certificate]:
    from cryptography.x509 import load_pem_x509_certificates

    raw = read_file(path)
    try:
        return load_pem_x509_certificates(raw)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} holds no certificate in PEM") from error


def _check_time(path: Path, certificate: Certificate) -> None:
    now = datetime.now(timezone.utc)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    whose = certificate.subject.rfc4514_string()
    if now > end:
        raise ValueError(f"the certificate of {whose} in {str(path)!r} expired at {end:%Y-%m-%d %H:%M} UTC")
    if now < begin:
        raise ValueError(f"the certificate of {whose} in {str(path)!r} begins at {begin:%Y-%m-%d %H:%M} UTC")
