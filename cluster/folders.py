"""Folders in a configuration are meant from where `up` runs; workers run elsewhere, and import from there."""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

from cluster.config import ClusterConfig, PoolConfig, RuntimeEnv
from cluster.errors import LaunchError

# What the cluster's processes import of ours.
PACKAGES = (
    "observability",
    "trust",
    "engine",
    "kv_transfer",
    "worker",
    "prefill_worker",
    "decode_worker",
    "router",
    "cluster",
    "pdserve",
)


def refuse_strangers() -> None:
    """The cluster's processes look for modules where `up` runs first: Ray has it so, and `python -m`. Raises
    LaunchError where they would find somebody else's under our names.
    """
    here = Path.cwd()
    if (here / "cluster" / "nodes" / "ray_head.py").is_file():
        return  # pdserve itself
    for name in PACKAGES:
        spec = PathFinder.find_spec(name, [str(here)])
        # A folder without code in it has no origin, and hides nothing.
        if spec is not None and spec.origin is not None:
            raise LaunchError(
                f"the cluster's processes would take {spec.origin} for pdserve's own {name!r}: "
                "run pdserve in another folder"
            )


def with_absolute_paths(config: ClusterConfig) -> ClusterConfig:
    """Raises LaunchError where a folder to be brought along is not here."""
    pools = {role.value: _pool(pool) for role, pool in config.pools.by_role().items()}
    model = config.model.model_copy(update={"id": _absolute(config.model.id)})
    pools_here = config.pools.model_copy(update=pools)
    # Workers read the files at the same paths of their own nodes.
    tls = None if config.network.tls is None else config.network.tls.absolute()
    network = config.network.model_copy(update={"tls": tls})
    router = config.router.settled()
    changed = {"model": model, "pools": pools_here, "network": network, "router": router}
    return config.model_copy(update=changed)


def _pool(pool: PoolConfig) -> PoolConfig:
    return pool.model_copy(update={"runtime_env": _runtime_env(pool.runtime_env)})


def _runtime_env(env: RuntimeEnv) -> RuntimeEnv:
    for name in filter(None, (env.working_dir, *env.py_modules)):
        if "://" not in name and not Path(name).expanduser().exists():
            raise LaunchError(f"runtime_env: there is no folder {name}")
    working_dir = _absolute(env.working_dir) if env.working_dir is not None else None
    modules = tuple(_absolute(each) for each in env.py_modules)
    return env.model_copy(update={"working_dir": working_dir, "py_modules": modules})


def _absolute(name: str) -> str:
    """What is no path here is a hub id, a URI or a packaged model."""
    path = Path(name).expanduser()
    is_path = path.is_dir() or (path.is_file() and path.suffix != "")
    return str(path.resolve()) if is_path else name
