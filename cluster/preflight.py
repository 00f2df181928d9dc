"""What `up` refuses before it starts anything, since no worker could live with it. `check` tells more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.errors import LaunchError
from cluster.nodes.machine import memory_bytes
from engine.errors import ModelError, NativeUnavailable
from engine.model_files import read_json
from engine.native.requirements import check_machine
from engine.weights import local_path
from trust.errors import TrustError


def refuse_early(config: ClusterConfig) -> None:
    """What the file alone shows, held against this machine. Raises LaunchError."""
    refuse_tls(config)
    _refuse_large_kv(config, memory_bytes())
    refuse_kernels(config)
    try:
        path = local_path(config.model.id)
        if path is not None and path.is_dir():
            refuse_context(config, path)
    except ModelError as error:
        raise LaunchError(f"model.id: {error}") from error


def refuse_tls(config: ClusterConfig) -> None:
    """Certificates by which the parts would not take each other. Other nodes' own are theirs to check. Raises
    LaunchError.
    """
    try:
        if config.network.tls is not None:
            config.network.tls.absolute().check()
    except TrustError as error:
        raise LaunchError(f"network.tls.{error}") from error


def _refuse_large_kv(config: ClusterConfig, available_bytes: int) -> None:
    """Other nodes may be larger, and a GPU has memory of its own."""
    if config.ray.address != "local":
        return
    for role, pool in config.pools.by_role().items():
        kv_bytes = pool.engine.kv_cache or 0
        if kv_bytes > available_bytes and not config.is_on_gpu(pool):
            raise LaunchError(
                f"pools.{role.value}.engine.kv_cache: {_gib(kv_bytes)} for each worker, and this machine has "
                f"{_gib(available_bytes)} of memory (pdserve check tells what a worker needs)"
            )


def refuse_kernels(config: ClusterConfig, model_folder: Path | None = None) -> None:
    """`compile: on` where workers on this machine's CPU cannot have our kernels. With `model_folder`: for the
    model's own dtype. Raises LaunchError.
    """
    is_on_cpu = any(not config.is_on_gpu(pool) for pool in config.pools.by_role().values())
    if config.model.compile != "on" or config.ray.address != "local" or not is_on_cpu:
        return
    dtype = None if config.model.dtype == "auto" else config.model.dtype
    try:
        check_machine(dtype or (None if model_folder is None else _stored_dtype(model_folder)))
    except NativeUnavailable as error:
        raise LaunchError(
            f"model.compile: on was asked for, and the kernels cannot be had: {error}"
        ) from error


def _stored_dtype(model_folder: Path) -> str:
    """What `dtype: auto` is on a CPU. Loads transformers."""
    from engine.architecture import choose_dtype, read_config, stored_dtype

    return choose_dtype("auto", stored_dtype(read_config(model_folder)), is_cuda=False)


def refuse_context(config: ClusterConfig, model_folder: Path) -> None:
    """Raises LaunchError for a context that the model has not, ModelError for a broken config.json."""
    wanted, path = config.model.max_model_len, model_folder / "config.json"
    context = _context(read_json(path)) if wanted is not None and path.exists() else None
    if wanted is not None and context is not None and wanted > context:
        raise LaunchError(f"model.max_model_len: {wanted} is more than the model's context of {context}")


def _context(values: Mapping[str, object]) -> int | None:
    text = values.get("text_config")
    context = (text if isinstance(text, Mapping) else values).get("max_position_embeddings")
    return context if isinstance(context, int) else None


def refuse_device(config: ClusterConfig) -> None:
    """Loads torch where a GPU was asked for. Raises LaunchError."""
    if config.model.device != "cuda" or config.ray.address != "local":
        return
    from engine.model_facts import gpu_memory_bytes

    if not gpu_memory_bytes():
        raise LaunchError("model.device: cuda was asked for, and torch finds none on this machine")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
