"""Certificates for tests: a CA of their own, and what it has issued, as files."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path


class Authority:
    """Writes into `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA(organization_name=name)
        self._folder = folder
        self.cert = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.cert))

    def issue(
        self, name: str, *, since_days: float = 1, for_days: float = 30, host: str = "127.0.0.1"
    ) -> Pair:
        """For `host`, valid from so many days ago to so many days from now."""
        now = datetime.now(timezone.utc).replace(tzinfo=None)
        issued = self._ca.issue_cert(
            host,
            common_name=name,
            not_before=now - timedelta(days=since_days),
            not_after=now + timedelta(days=for_days),
        )
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        pair.key.write_bytes(issued.private_key_pem.bytes())
        return pair
