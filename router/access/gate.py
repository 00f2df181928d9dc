"""May this call be made? Both fronts ask here, with what stands in the call's `authorization`."""

from __future__ import annotations

import base64
import binascii
import logging

from pdserve.v1.errors import PermissionDenied, Unauthenticated
from router.access.changes import Changes
from router.access.keys import ApiKey, Permission, find_key
from router.access.settings import ApiKeySource

logger = logging.getLogger(__name__)

ANY = frozenset(Permission)


class Gate:
    """`source` None: there are no keys, and whoever reaches the port may do everything."""

    def __init__(self, source: ApiKeySource | None) -> None:
        """`source` is settled. Raises ValueError."""
        self._source = source
        self._keys = () if source is None else source.read()
        file = None if source is None else source.file
        self._changes = None if file is None else Changes((file,))

    def check(self, authorization: str | None, permissions: frozenset[Permission]) -> None:
        """`permissions`: one of these is enough. Raises Unauthenticated or PermissionDenied."""
        if self._source is None:
            return
        self._renew(self._source)
        presented = _key_in(authorization)
        if presented is None:
            raise Unauthenticated("an API key is needed: send it as `Authorization: Bearer KEY`")
        key = find_key(presented, self._keys)
        if key is None:
            raise Unauthenticated("the API key is not known here")
        if not key.permissions & permissions:
            wanted = " or ".join(sorted(each.value for each in permissions))
            raise PermissionDenied(f"the API key {key.name!r} lacks the permission {wanted}")

    def _renew(self, source: ApiKeySource) -> None:
        """A file that has become unreadable takes no key away."""
        if self._changes is None or not self._changes.have_come():
            return
        try:
            self._keys = source.read()
        except ValueError as error:
            logger.warning("the API keys stay as they were: %s: %s", source.file, error)
        else:
            logger.info("the API keys were read again: %s", _names(self._keys))


def _key_in(authorization: str | None) -> str | None:
    """Of `Bearer KEY`, or of `Basic`, as browsers ask for it: the password, whatever the user's name."""
    scheme, _, rest = (authorization or "").partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer":
        return rest or None
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2] or None
        except (binascii.Error, ValueError):
            return None
    return None


def _names(keys: tuple[ApiKey, ...]) -> str:
    return ", ".join(key.name for key in keys)
