"""Where the commands write: answers to stdout, everything else to stderr."""

from __future__ import annotations

import sys

from rich.console import Console

# A file or a pipe has no width that a table would have to fit in.
_PIPE_WIDTH = None if sys.stdout.isatty() else 200
out = Console(highlight=False, soft_wrap=True, width=_PIPE_WIDTH)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def write(text: str) -> None:
    """An answer's text as it comes, untouched."""
    sys.stdout.write(text)
    sys.stdout.flush()


def error_line(error: BaseException) -> None:
    err.print("[bold red]error:[/]", end=" ")
    err.print(str(error) or type(error).__name__, markup=False)
