"""Why no router answered, in place of what gRPC says of it."""

from __future__ import annotations

# Words of gRPC's message, and what they mean to who typed the command. The first that fits.
_MEANINGS = (
    (
        "missing selected ALPN",
        "by TLS something answers that is no gRPC: is this the HTTP port?",
    ),
    ("an http1.x server", "HTTP answers there, not gRPC: is this the HTTP port?"),
    ("WRONG_VERSION_NUMBER", "it speaks no TLS there: leave out --tls, --ca and --cert"),
    (
        "Hostname Verification Check failed",
        "its certificate is not for the name or address that was asked for (subjectAltName)",
    ),
    ("certificate has expired", "its certificate has expired"),
    ("certificate is not yet valid", "its certificate is not valid yet"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not of the CA that is trusted here: give its own by --ca",
    ),
    # A server that refuses what it was shown just closes.
    (
        "Socket closed",
        "the connection was closed: the port may want TLS (--tls or --ca), or of its clients a certificate "
        "of a CA that it knows (--cert and --key)",
    ),
)


def why_no_answer(text: str) -> str:
    """`text` is gRPC's: "failed to connect to all addresses; last error: UNKNOWN: ipv4:HOST:PORT: …"."""
    told = text.rpartition("ipv4:")[2]
    for words, meaning in _MEANINGS:
        if words in told:
            place = told.partition(": ")[0]
            return f"{place}: {meaning}"
    return told
