"""Writes docs/api.md from the protos and the models of HTTP. `make docs` runs it; a test sees that it was.

python docs/make_api.py [--print]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from api_of_http import of_http  # noqa: E402
from api_of_protos import described, of_protos  # noqa: E402

from router.http.errors import TABLE  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
HEAD = """# API reference

Made by `docs/make_api.py` from `proto/pdserve/v1` and `router/http`: do not edit.

The Python client (`from pdserve import Client`) has the same names; `help("pdserve.client.Client")` and
`help("pdserve.requests.GenerateOptions")` are its reference. What workers say to each other and to routers is
in [worker.proto](../proto/pdserve/v1/worker.proto); nobody else has to know it.

"""
HTTP_HEAD = """## HTTP

What each path serves and what statuses mean is in the [README](../README.md#over-http). Unknown fields are
ignored. A field that is known and **not served** is a 400 as soon as it is used.
"""
ERRORS_HEAD = """## Errors

One table for both: the classes of `pdserve.v1.errors`, which the Python client raises. Some reasons have an
HTTP status of their own (413, 415). See [failures](failures.md) for when each comes.

| class | gRPC status | HTTP | OpenAI's `type` |
|---|---|---|---|
"""


def page() -> str:
    files = described(sorted((ROOT / "proto/pdserve/v1").glob("*.proto")))
    return HEAD + "\n".join([*of_protos(files), HTTP_HEAD, *of_http(), ERRORS_HEAD + _errors()])


def _errors() -> str:
    rows = [
        f"| `{kind.__name__}` | `{kind.code.name}` | {mapped.status} | `{mapped.type}` |"
        for kind, mapped in TABLE.items()
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), encoding="utf-8")
