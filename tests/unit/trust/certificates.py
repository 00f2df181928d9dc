"""Certificates of a cluster's parts, made by an authority that lives as long as a test."""

from __future__ import annotations

from pathlib import Path

from tests.certificates import Authority
from trust.tls import MutualTls


class PartsAuthority:
    def __init__(self, folder: Path, name: str = "parts-ca") -> None:
        self._authority = Authority(folder, name)
        self.cert = self._authority.cert

    def files(self, part: str, name: str = "pdserve", *, for_days: float = 30) -> MutualTls:
        """A certificate for `name`, which ends so many days from now."""
        pair = self._authority.issue(part, since_days=60, for_days=for_days, host=name)
        return MutualTls(ca=self.cert, cert=pair.cert, key=pair.key)
