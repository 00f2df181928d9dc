"""One rig for all cells, and their table at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.matrix.outcome import Outcome
from tests.faults.matrix.rig import Rig
from tests.faults.matrix.rig import rig as running
from tests.faults.matrix.table import in_words

_OUTCOMES = pytest.StashKey[list[Outcome]]()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with running(folder, tmp_path_factory.mktemp("routers")) as made:
        yield made


@pytest.fixture
def outcomes(request: pytest.FixtureRequest) -> list[Outcome]:
    """Of all cells so far; what is added is told at the end of the run."""
    return request.config.stash.setdefault(_OUTCOMES, [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    if outcomes := config.stash.get(_OUTCOMES, []):
        terminalreporter.write_sep("=", "faults")
        terminalreporter.write(in_words(outcomes))
