"""One secret for all that tests start, in this process and in those that it starts: they inherit the name of
its file."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from trust.secret import Secret
from trust.trust import TrustFiles

_NAME = "PDSERVE_TESTS_SECRET"


def _file() -> Path:
    if _NAME not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="pdserve-tests-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        Secret.fresh().write(folder / "secret")
        os.environ[_NAME] = str(folder / "secret")
    return Path(os.environ[_NAME])


TRUST_FILES = TrustFiles(secret=_file())
TRUST = TRUST_FILES.read()
