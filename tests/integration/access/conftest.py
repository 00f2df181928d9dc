from __future__ import annotations

from pathlib import Path

import pytest

from router.access.keys import Permission, new_key
from tests.certificates import Authority, Pair
from tests.integration.access.callers import Keys
from tests.integration.router.conftest import model_dir

__all__ = ["model_dir"]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def pair(authority: Authority) -> Pair:
    """The router's."""
    return authority.issue("router")


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = {each: new_key(each.value, [each]) for each in Permission}
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("".join(f"{line}\n" for _, line in made.values()))
    return Keys(file, {each: key for each, (key, _) in made.items()})
