"""The router's certificate, as gRPC and HTTP take it. When its files change, new connections get the new
one."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable

import grpc
from pydantic import ValidationError

from router.access.certificates import read_file
from router.access.changes import Changes
from router.access.settings import TlsFiles

logger = logging.getLogger(__name__)


def grpc_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Raises ValueError."""
    is_changed = _watcher(files)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Asked at every handshake. None: as before."""
        return _grpc_certificate(files) if is_changed() else None

    must_show = files.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(
        _grpc_certificate(files),
        renewed,  # type: ignore[arg-type] # the stubs have forgotten None
        must_show,
    )


def _grpc_certificate(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    authorities = None if files.client_ca is None else read_file(files.client_ca)
    pair = read_file(files.key), read_file(files.cert)
    return grpc.ssl_server_certificate_configuration([pair], authorities)


def ssl_context(files: TlsFiles) -> ssl.SSLContext:
    """For a server. Raises ValueError or OSError."""
    is_changed = _watcher(files)
    context = _ssl_context(files)
    current = context

    def renew(connection: ssl.SSLObject, name: str | None, of: ssl.SSLContext) -> None:
        """Called within every handshake, whether or not a name was asked for."""
        nonlocal current
        if is_changed():
            current = _ssl_context(files)
        connection.context = current

    context.sni_callback = renew
    return context


def _ssl_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.cert, files.key)
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(files.client_ca)
    return context


def _watcher(files: TlsFiles) -> Callable[[], bool]:
    """Tells once that the files have changed, and fit each other: of a pair that is just being replaced
    nothing is taken yet."""
    changes = Changes([path for _, path in files if path is not None])

    def is_changed() -> bool:
        if not changes.have_come():
            return False
        try:
            TlsFiles.model_validate(files.model_dump())
        except ValidationError as error:
            complaint = error.errors(include_url=False, include_input=False)[0]["msg"]
            logger.warning("the certificate stays as it was: %s", complaint)
            return False
        logger.info("a new certificate is used: %s", files.cert)
        return True

    return is_changed
