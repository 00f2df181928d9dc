"""A pool's runtime environment as Ray takes it for an actor: local folders go to Ray's own store first."""

from __future__ import annotations

import logging
import tempfile

from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
from ray.runtime_env import RuntimeEnv as RayRuntimeEnv

from cluster.config import RuntimeEnv

log = logging.getLogger(__name__)


def packed(env: RuntimeEnv) -> RayRuntimeEnv | None:
    """Uploads what is not there yet under its contents' hash, which may take seconds; None: nothing to bring.

    Ray packs folders for a whole driver only. Here it is done for each worker that starts, since Ray
    forgets a package when nobody uses it any more. Raises ValueError or RuntimeEnvSetupError.
    """
    given = {key: value for key, value in env.model_dump(mode="json").items() if value}
    if not given:
        return None
    with tempfile.TemporaryDirectory(prefix="pdserve-") as scratch:
        given = upload_py_modules_if_needed(given, include_gitignore=True, scratch_dir=scratch, logger=log)
        given = upload_working_dir_if_needed(given, include_gitignore=True, scratch_dir=scratch, logger=log)
    given.pop("excludes", None)
    return RayRuntimeEnv(**given)
