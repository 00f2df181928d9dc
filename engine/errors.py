"""What the engine raises.

EngineError
├── ModelError           the model cannot be read or honoured; says which and why
│   ├── ModelNotFound
│   └── UnsupportedModel
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


class UnsupportedModel(ModelError):
    """The paged attention cannot honour this architecture; the message names what it lacks."""


class CannotFit(EngineError):
    """The sequence can never run here, whatever finishes before it."""


class NoRoom(EngineError):
    """The sequence could run here, but not now."""


class IntegrityError(EngineError):
    """`check_integrity` found books that do not balance."""
