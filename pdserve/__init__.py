"""pdserve: prefill and decode on separate worker pools.

`from pdserve import Client` is what a user needs; it is loaded when first asked for, so that the floors
below, which import `pdserve.v1`, do not drag it in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.client import Client

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Client":
        from pdserve.client import Client

        return Client
    raise AttributeError(f"module 'pdserve' has no attribute {name!r}")
