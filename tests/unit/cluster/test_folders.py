"""Folders are meant from where `up` runs, whoever opens them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config_file import parse_config
from cluster.errors import LaunchError
from cluster.folders import PACKAGES, refuse_strangers, with_absolute_paths
from worker.identity import Role

ROOT = Path(__file__).parents[3]


def test_folders_become_absolute_and_other_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "code", "more"):
        (tmp_path / name).mkdir()
    config = parse_config(
        "name: x\nmodel: {id: model}\n"
        "pools: {colocated: {runtime_env: {working_dir: code, py_modules: [more, 's3://a/b.zip']}}}\n",
        "f",
    )
    meant = with_absolute_paths(config)
    env = meant.pools.by_role()[Role.COLOCATED].runtime_env
    assert meant.model.id == str(tmp_path / "model")
    assert env.working_dir == str(tmp_path / "code")
    assert env.py_modules == (str(tmp_path / "more"), "s3://a/b.zip")
    hub = parse_config("name: x\nmodel: {id: org/name}\npools: {colocated: {}}\n", "f")
    assert with_absolute_paths(hub) == hub


def test_a_folder_that_is_not_there_is_told() -> None:
    config = parse_config("name: x\npools: {colocated: {runtime_env: {working_dir: /none}}}\n", "f")
    with pytest.raises(LaunchError, match="runtime_env: there is no folder /none"):
        with_absolute_paths(config)


@pytest.mark.parametrize("stranger", ["worker.py", "cluster/__init__.py"])
def test_modules_that_would_be_taken_for_ours_are_told(
    stranger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine").mkdir()  # without code: Python looks further
    refuse_strangers()
    file = tmp_path / stranger
    file.parent.mkdir(exist_ok=True)
    file.touch()
    name = Path(stranger).parts[0].removesuffix(".py")
    with pytest.raises(LaunchError, match=f"take {file} for pdserve's own '{name}': run pdserve in another"):
        refuse_strangers()


def test_pdserve_may_be_started_in_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    refuse_strangers()
    assert all((ROOT / name).is_dir() for name in PACKAGES)
    assert sorted(PACKAGES) == sorted(file.parent.name for file in ROOT.glob("*/__init__.py"))
