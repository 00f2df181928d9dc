"""Where `pdserve` begins: it minds Ctrl-C while the commands are still being imported too."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from pdserve.cli.app import run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
