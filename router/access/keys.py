"""API keys: what is kept of them, and whose a presented one is.

A line of the file is `NAME PERMISSIONS sha256:HEX`, like `alice generate,admin sha256:9f86d0…`; what follows
a `#` is a comment. A key has 256 random bits, so nobody can guess one and hash it: one plain SHA-256 keeps
it as safe as the slow, salted hashes that passwords need, and costs a request a microsecond.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

PREFIX = "pdk_"
_RANDOM_BYTES = 32
# Longer ones are not even hashed.
_MAX_KEY_BYTES = 512
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")


class Permission(Enum):
    """GENERATE: answers, and the model's facts. ADMIN: GetCluster, ScalePool, DrainWorker,
    RestartRouter and the page. METRICS: nothing but what Prometheus reads, which every key may."""

    GENERATE = "generate"
    ADMIN = "admin"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    permissions: frozenset[Permission]
    digest: bytes


def parse_keys(lines: Iterable[str]) -> tuple[ApiKey, ...]:
    """Raises ValueError, which names the line and never quotes it: somebody may have put the key there."""
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        key = _parsed(words, number)
        if key.name in keys:
            raise ValueError(f"line {number}: there are two keys {key.name!r}")
        keys[key.name] = key
    if not keys:
        raise ValueError("there is no key in it: `pdserve key new NAME` makes one")
    return tuple(keys.values())


def _parsed(words: Sequence[str], number: int) -> ApiKey:
    found = _HASH.fullmatch(words[2]) if len(words) == 3 else None
    if found is None or _NAME.fullmatch(words[0]) is None:
        raise ValueError(
            f"line {number} is not NAME PERMISSIONS sha256:HEX, as `pdserve key new NAME` prints it"
        )
    try:
        permissions = frozenset(Permission(word) for word in words[1].split(","))
    except ValueError:
        known = ", ".join(each.value for each in Permission)
        raise ValueError(f"line {number}: permissions are {known}, with commas between") from None
    return ApiKey(words[0], permissions, bytes.fromhex(found[1]))


def find_key(presented: str, keys: Iterable[ApiKey]) -> ApiKey | None:
    """Takes as long for a wrong key as for a right one, whichever it is."""
    raw = presented.encode(errors="replace")
    if len(raw) > _MAX_KEY_BYTES:
        return None
    digest = hashlib.sha256(raw).digest()
    found: ApiKey | None = None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found


def new_key(name: str, permissions: Iterable[Permission]) -> tuple[str, str]:
    """A key for its user, and the line for the file. Raises ValueError for what is no name."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a name: letters, digits and . _ @ -, 64 at most")
    key = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    wanted = set(permissions)
    words = ",".join(each.value for each in Permission if each in wanted)
    return key, f"{name} {words} sha256:{hashlib.sha256(key.encode()).hexdigest()}"
