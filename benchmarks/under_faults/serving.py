"""The cluster that is put to the test: float32, so that every answer has one right form."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.weights import resolve_model
from pdserve.bench.own_cluster import own_cluster
from tests.models import tiny_model

TINY = "tiny"


@dataclass(frozen=True, slots=True)
class Served:
    address: str
    # The model's, with its tokenizer and float32 weights.
    folder: Path


@contextmanager
def served(
    model: str, replicas: dict[str, int], kv_cache: str, transport: str, say: Callable[[str], None]
) -> Iterator[Served]:
    """`model`: TINY (random weights, made here) or what `model.id` takes. `replicas`: by role."""
    with tempfile.TemporaryDirectory(prefix="pdserve-faults-") as scratch:
        folder = tiny_model(Path(scratch)) if model == TINY else resolve_model(model)
        pool = {"threads": 1, "resources": {"num_cpus": 1}, "engine": {"kv_cache": kv_cache}}
        config: dict[str, object] = {
            "model": {"id": str(folder), "dtype": "float32"},
            "kv_transfer": {"transport": transport},
            "pools": {role: {**pool, "replicas": count} for role, count in replicas.items()},
        }
        with own_cluster("under-faults", config, say) as address:
            yield Served(address, folder)
