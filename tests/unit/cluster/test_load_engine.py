"""On what a worker computes is what its pool has asked for."""

from __future__ import annotations

import pytest

from cluster.actors import role_worker
from cluster.actors.role_worker import load_engine
from cluster.config import ClusterConfig
from cluster.config_file import parse_config
from cluster.control.worker_handle import WorkerSpec
from engine.config import ModelConfig
from engine.errors import ModelError


def loaded_on(config: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    devices: list[str] = []

    def load(model: ModelConfig, *_: object) -> None:
        devices.append(model.device)
        raise ModelError("it is not loaded here")

    monkeypatch.setattr(role_worker, "use_threads", lambda _: None)
    monkeypatch.setattr(role_worker.Engine, "load", load)
    ((role, pool),) = config.pools.by_role().items()
    spec = WorkerSpec("c", "w-0", "key", role, config.model, pool, config.kv_transfer, config.observability)
    with pytest.raises(ModelError, match="not loaded here"):
        load_engine(spec, lambda detail: None)
    (device,) = devices
    return device


@pytest.mark.parametrize(
    ("device", "num_gpus", "loaded"),
    [("auto", 0, "cpu"), ("auto", 0.5, "auto"), ("cpu", 1, "cpu"), ("cuda", 0, "cuda"), ("cuda", 1, "cuda")],
)
def test_a_pool_that_asks_for_no_gpu_takes_none(
    device: str, num_gpus: float, loaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray lets its workers see all of them, also those that others were given."""
    pools = f"{{colocated: {{resources: {{num_gpus: {num_gpus}}}}}}}"
    config = parse_config(f"name: x\nmodel: {{device: {device}}}\npools: {pools}\n", "f")
    assert loaded_on(config, monkeypatch) == loaded
    (pool,) = config.pools.by_role().values()
    assert config.is_on_gpu(pool) == (loaded != "cpu")
