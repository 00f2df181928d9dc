"""What a benchmark raises. Each message is one line for the user.

BenchError
└── VllmError    the other engine cannot be asked: no such interpreter, no vllm in it, or it failed
"""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot be run, or could not be finished."""


class VllmError(BenchError):
    """vLLM cannot be compared with here."""
