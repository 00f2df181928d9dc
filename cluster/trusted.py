"""By what the parts of one cluster know each other: its secret lies in its folder, made anew by each `up`."""

from __future__ import annotations

from pathlib import Path

from cluster.config import ClusterConfig
from trust.secret import Secret
from trust.trust import TrustFiles

SECRET_FILE = "secret"


def make_secret(folder: Path) -> None:
    """`folder`: the cluster's own (see cluster.state). Raises OSError."""
    Secret.fresh().write(folder / SECRET_FILE)


def trust_files(config: ClusterConfig, folder: Path) -> TrustFiles:
    return TrustFiles(secret=folder / SECRET_FILE, tls=config.network.tls)
