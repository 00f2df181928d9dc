"""What `check_integrity` raises."""

from __future__ import annotations


class IntegrityError(Exception):
    """The router's books do not balance: a bug."""
