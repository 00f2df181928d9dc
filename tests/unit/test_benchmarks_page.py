"""docs/benchmarks.md names every benchmark that there is, and none that is not."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from pdserve.cli.bench import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
# It is no benchmark by itself: others are measured on it.
NOT_ALONE = {"benchmarks/stub_workers.py"}


def script(path: Path) -> str:
    """As the page's commands have it."""
    name = path.relative_to(ROOT).as_posix()
    return name.removesuffix("/__main__.py")


def scripts() -> set[str]:
    """What can be run."""
    found = (ROOT / "benchmarks").rglob("*.py")
    runs = [path for path in found if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")]
    own_process = {script(path) for path in runs if path.name.endswith("_process.py")}
    return {script(path) for path in runs} - own_process - NOT_ALONE


def told() -> set[str]:
    modules = re.findall(r"python -m (benchmarks[.\w]+)", PAGE)
    paths = {module.replace(".", "/") for module in modules}
    return {path if (ROOT / path).is_dir() else f"{path}.py" for path in paths} | set(
        re.findall(r"python (benchmarks/\S+\.py)", PAGE)
    )


def test_the_page_names_every_benchmark_and_no_other() -> None:
    assert told() == scripts()


def test_the_page_names_every_bench_command() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"`pdserve bench (\w+)", PAGE)) == set(commands)
