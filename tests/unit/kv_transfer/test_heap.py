"""Memory that is kept for what comes next."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys
from kv_transfer.heap import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)

def touched() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        held = [b"x" * 3_000_000 for _ in range(4)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

touched()
print(touched())
"""


def _num_faults(how: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", _FAULTS, how], capture_output=True, text=True, timeout=60, check=False
    )
    if ran.returncode == 3:
        pytest.skip("not glibc")
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


def test_kept_memory_is_not_faulted_in_again() -> None:
    assert _num_faults("keep") * 10 < _num_faults("leave")
