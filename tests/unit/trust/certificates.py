"""Certificates of a cluster's parts, made by an authority that lives as long as a test."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import trustme

from trust.tls import MutualTls


class PartsAuthority:
    def __init__(self, folder: Path, name: str = "parts-ca") -> None:
        self._ca = trustme.CA(organization_name=name)
        self._folder = folder
        self.cert = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.cert))

    def files(self, part: str, name: str = "pdserve", *, for_days: float = 30) -> MutualTls:
        """A certificate for `name`, which ends so many days from now."""
        now = datetime.now(timezone.utc).replace(tzinfo=None)
        issued = self._ca.issue_cert(
            name, not_before=now - timedelta(days=60), not_after=now + timedelta(days=for_days)
        )
        cert, key = self._folder / f"{part}.pem", self._folder / f"{part}.key"
        cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return MutualTls(ca=self.cert, cert=cert, key=key)
