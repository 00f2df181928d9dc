"""Those who ask a guarded router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.access.keys import Permission


@dataclass(frozen=True)
class Keys:
    """One key for each permission, and the file that a router reads."""

    file: Path
    of: dict[Permission, str]

    @property
    def user(self) -> str:
        return self.of[Permission.GENERATE]

    @property
    def admin(self) -> str:
        return self.of[Permission.ADMIN]

    @property
    def scraper(self) -> str:
        return self.of[Permission.METRICS]

    @property
    def settings(self) -> dict[str, object]:
        return {"api_keys": {"file": self.file}}
