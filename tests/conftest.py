"""For every test: one thread of arithmetic, and nothing left behind."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

from tests.integrity import nothing_leaks

__all__ = ["nothing_leaks"]

# Tests share the machine's cores with the processes that they start.
torch.set_num_threads(1)

# A busy machine is no fault of an example's.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
