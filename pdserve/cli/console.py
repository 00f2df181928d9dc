"""Where the commands write: answers to stdout, everything else to stderr."""

from __future__ import annotations

import sys

from rich.console import Console

from pdserve.cli.no_answer import why_no_answer
from pdserve.v1.errors import Unauthenticated, Unavailable

# The exit code after Ctrl-C, as shells give it: 128 + SIGINT.
INTERRUPTED = 130
# A file or a pipe has no width that a table would have to fit in. Where stdout is closed there is none.
_PIPE_WIDTH = None if sys.stdout is not None and sys.stdout.isatty() else 200
out = Console(highlight=False, soft_wrap=True, width=_PIPE_WIDTH)
err = Console(stderr=True, highlight=False, soft_wrap=True)

# A model may be led to say what moves a terminal's cursor, names its window or fills its clipboard.
_VISIBLE: dict[int, int | None] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_VISIBLE |= {ord("\r"): None, 0x7F: ord("␡")} | dict.fromkeys(range(0x80, 0xA0), ord("�"))


def can_redraw() -> bool:
    """A pipe keeps what was written, whatever FORCE_COLOR says of it, and so does a dumb terminal."""
    is_tty = sys.stdout is not None and sys.stdout.isatty()
    return is_tty and out.is_terminal and not out.is_dumb_terminal


def write(text: str) -> None:
    """An answer's text as it comes: untouched, but for what would give orders to a terminal."""
    if sys.stdout is not None:
        sys.stdout.write(text.translate(_VISIBLE) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def left_behind(name: str) -> str:
    """For somebody who did not want to wait for a cluster's end."""
    return f"interrupted: a part of it may still run; this ends the rest: pdserve down {name}"


def error_line(error: BaseException, where: str = "") -> None:
    err.print("[bold red]error:[/]", end=" ")
    err.print(f"{where}{_in_words(error)}", markup=False)


def _in_words(error: BaseException) -> str:
    """gRPC's own failures say little to somebody who knows no gRPC."""
    text = str(error) or type(error).__name__
    if isinstance(error, Unauthenticated) and error.reason == Unauthenticated.default_reason:
        return f"{text} (here: PDSERVE_API_KEY, or --api-key-file)"
    is_router_lost = isinstance(error, Unavailable) and error.reason != "CONTROLLER_LOST"
    if is_router_lost and "failed to connect" in text:
        return f"no router answers there: {why_no_answer(text)}"
    return text
