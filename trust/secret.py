"""The cluster's secret: made by `up`, kept in a file that its user alone may read, shown in every call.

256 random bits, so nothing about it can be guessed or searched; whoever has it is part of the cluster.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from trust.errors import TrustError

KEY = "pdserve-secret"
_NUM_BYTES = 32

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True, eq=False)
class Secret:
    """Not in its repr, so that no log and no traceback can have it."""

    text: str = field(repr=False)

    @classmethod
    def fresh(cls) -> Secret:
        return cls(secrets.token_hex(_NUM_BYTES))

    @property
    def shown(self) -> tuple[str, str]:
        """The pair of metadata that goes with a call."""
        return KEY, self.text

    def is_shown_in(self, metadata: Metadata) -> bool:
        """In constant time for whatever was shown. Once, so that no call can try several."""
        shown = [value for key, value in metadata if key == KEY]
        if len(shown) != 1:
            return False
        value = shown[0]
        return hmac.compare_digest(value if isinstance(value, bytes) else value.encode(), self.text.encode())

    def write(self, path: Path) -> None:
        """Anew: never into a file that others may have open. Raises OSError."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(self.text)


def read_secret(path: Path) -> Secret:
    """Raises TrustError."""
    try:
        with open(path, encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise TrustError(f"the cluster's secret in {path} cannot be read: {reason}") from error
    if mode & 0o077:
        raise TrustError(f"the cluster's secret in {path} could be read by others: its mode must be 600")
    if len(text) < 2 * _NUM_BYTES:
        raise TrustError(f"the cluster's secret in {path} is too short to be one")
    return Secret(text)
