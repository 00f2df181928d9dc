"""Where `pdserve` begins: it minds Ctrl-C while the commands are still being imported too."""

from __future__ import annotations

import os
import sys


def main() -> None:
    # Its lines of C++ say nothing that an error's own line does not. It reads this as it is loaded; what a
    # command starts does not inherit it.
    is_told = "GRPC_VERBOSITY" in os.environ
    if not is_told:
        os.environ["GRPC_VERBOSITY"] = "NONE"
    try:
        from pdserve.cli.app import run

        if not is_told:
            del os.environ["GRPC_VERBOSITY"]
        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
