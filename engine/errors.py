"""What the engine raises.

EngineError
├── ModelError           the model cannot be read or honoured; says which and why
│   ├── ModelNotFound
│   ├── BrokenModel
│   └── UnsupportedModel
├── NativeUnavailable    our kernels cannot be had for this machine or model; says why
├── GrammarError         the grammar cannot be compiled, or does not allow what is known already
├── CannotFit            the sequence can never run here: too long for the pool or the context
├── NoRoom               not now: blocks or running places are all taken
└── IntegrityError       the books do not balance: a bug
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error of the engine."""


class ModelError(EngineError):
    """The model cannot be used."""


class ModelNotFound(ModelError):
    """Nothing readable lies behind this model id."""


class BrokenModel(ModelError):
    """A file of the model is cut short or damaged; the message names it."""


class UnsupportedModel(ModelError):
    """The paged attention cannot honour this architecture; the message names what it lacks."""


class NativeUnavailable(EngineError):
    """Our kernels cannot be had for this machine or model; says why."""


class GrammarError(EngineError):
    """The grammar cannot be compiled, or does not allow what is known already; says why."""


class CannotFit(EngineError):
    """The sequence can never run here, whatever finishes before it."""


class NoRoom(EngineError):
    """The sequence could run here, but not now."""


class IntegrityError(EngineError):
    """`check_integrity` found books that do not balance."""


def first_line(error: Exception) -> str:
    """What another library says, without its pages of advice."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
