"""What a part of the cluster shows to the others, and demands of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from trust.secret import Secret, read_secret
from trust.tls import MutualTls


@dataclass(frozen=True, slots=True)
class Trust:
    """The files of `tls` are read by each process for itself, on whatever node that is."""

    secret: Secret
    # None: in the clear.
    tls: MutualTls | None = None

    @classmethod
    def fresh(cls) -> Trust:
        return cls(Secret.fresh())


class TrustFiles(BaseModel):
    """Where a part finds it: paths may be told to anybody."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    secret: Path
    tls: MutualTls | None = None

    def read(self) -> Trust:
        """Raises TrustError, also for certificates and keys that cannot be read."""
        if self.tls is not None:
            self.tls.read()
        return Trust(read_secret(self.secret), self.tls)
