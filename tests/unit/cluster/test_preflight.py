"""What `up` refuses before it starts anything: no folder, no process, no look-up on a hub."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from cluster import launch
from cluster.config import ClusterConfig
from cluster.config_file import parse_config
from cluster.errors import LaunchError
from cluster.preflight import refuse_context, refuse_device, refuse_early, refuse_kernels
from engine import model_facts, weights
from engine.native import requirements


def config(model: str = "id: a/name", pools: str = "{colocated: {}}", more: str = "") -> ClusterConfig:
    return parse_config(f"name: x\nmodel: {{{model}}}\npools: {pools}\n{more}\n", "f")


def model_folder(folder: Path, **values: object) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_refusal_leaves_nothing_and_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(weights, "snapshot_download", pytest.fail)
    told: list[str] = []
    with pytest.raises(LaunchError, match=r"model\.id: there is no folder nofolder"):
        launch.up(config("id: ./nofolder"), lambda what, how: told.append(what))
    assert told == []
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("path", ["/none/at/all", "./none", "../none", "~/none", "./none.gguf", "none.gguf"])
def test_a_path_where_nothing_is_is_refused(path: str) -> None:
    with pytest.raises(LaunchError, match=r"model\.id: there is no f"):
        refuse_early(config(f"id: {path}"))


def test_a_name_is_left_to_the_hub() -> None:
    refuse_early(config("id: some/name"))


def test_a_kv_cache_larger_than_memory_is_refused_by_its_key() -> None:
    large = "{prefill: {}, decode: {engine: {kv_cache: 100000GiB}}}"
    with pytest.raises(LaunchError, match=r"^pools\.decode\.engine\.kv_cache: 100000\.0 GiB for each worker"):
        refuse_early(config(pools=large))
    # Where memory is somebody else's: other nodes', a GPU's.
    refuse_early(config(pools=large, more="ray: {address: auto}"))
    refuse_early(config("device: cuda", pools=large))
    refuse_early(config(pools="{colocated: {resources: {num_gpus: 1}, engine: {kv_cache: 100000GiB}}}"))


@pytest.mark.parametrize("nested", [False, True])
def test_a_context_that_the_model_has_not_is_refused(tmp_path: Path, nested: bool) -> None:
    values: dict[str, object] = {"max_position_embeddings": 2048}
    folder = model_folder(tmp_path, **({"text_config": values} if nested else values))
    told = r"model\.max_model_len: 2049 is more than the model's context of 2048"
    with pytest.raises(LaunchError, match=told):
        refuse_early(config(f"id: '{folder}', max_model_len: 2049"))
    refuse_early(config(f"id: '{folder}', max_model_len: 2048"))
    refuse_early(config(f"id: '{folder}'"))


def test_a_context_is_refused_only_where_the_model_names_one(tmp_path: Path) -> None:
    refuse_context(config("max_model_len: 99999"), tmp_path)
    refuse_context(config("max_model_len: 99999"), model_folder(tmp_path, model_type="x"))


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_facts, "gpu_memory_bytes", lambda: ())
    with pytest.raises(LaunchError, match=r"model\.device: cuda was asked for, and torch finds none"):
        refuse_device(config("device: cuda"))
    refuse_device(config("device: cuda", more="ray: {address: auto}"))
    refuse_device(config())
    monkeypatch.setattr(model_facts, "gpu_memory_bytes", lambda: (2**34,))
    refuse_device(config("device: cuda"))


@pytest.mark.parametrize("lacking", ["a compiler", "AVX512F"])
def test_kernels_that_this_machine_cannot_have_are_refused_at_once(
    lacking: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processor_with(monkeypatch, "avx512f" if lacking == "a compiler" else "avx2")
    if lacking == "a compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LaunchError, match=r"model\.compile: on was asked for, and the kernels cannot be had: "
    ):
        refuse_early(config("id: a/name, compile: on"))
    refuse_early(config("id: a/name"))
    refuse_early(config("id: a/name, compile: on", more="ray: {address: auto}"))
    refuse_early(config("id: a/name, compile: on, device: cuda"))


def test_kernels_are_refused_in_the_dtype_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor_with(monkeypatch, "avx512f")
    monkeypatch.setattr(requirements, "find_compiler", lambda deadline: ("g++", "1"))
    folder = model_folder(tmp_path, model_type="llama", dtype="bfloat16")
    refuse_kernels(config("compile: on"))
    with pytest.raises(LaunchError, match="no AVX512-BF16"):
        refuse_kernels(config("compile: on"), folder)
    with pytest.raises(LaunchError, match="no AVX512-BF16"):
        refuse_early(config("id: a/name, compile: on, dtype: bfloat16"))
    with pytest.raises(LaunchError, match="the kernels have no float16"):
        refuse_early(config("id: a/name, compile: on, dtype: float16"))
    refuse_kernels(config("compile: on, dtype: float32"), folder)


def processor_with(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    lines = f"processor : 0\nflags : fpu {' '.join(flags)}\n"
    monkeypatch.setattr(requirements, "read_cpuinfo", lambda: lines)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
