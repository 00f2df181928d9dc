"""A child process that says again and again, on its stdout, that it runs; and what follows if it does not."""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)

# A look that was in vain because this process itself did not run counts once, however long that was.
_LOOK_S = 3.0
_LOOKS_IN_VAIN = 5


async def until_ended(child: asyncio.subprocess.Process, look_s: float = _LOOK_S) -> int:
    """Its exit code. One that says nothing, look after look, hangs, and is killed."""
    said = child.stdout
    if said is None:
        raise ValueError("its stdout is not read")
    num_silent = 0
    while num_silent < _LOOKS_IN_VAIN:
        try:
            if not await asyncio.wait_for(said.read(4096), look_s):
                break
            num_silent = 0
        except asyncio.TimeoutError:
            num_silent += 1
    else:
        log.warning("pid=%d has said nothing for %.0f s and is killed", child.pid, num_silent * look_s)
        if child.returncode is None:
            child.kill()
    return await child.wait()
