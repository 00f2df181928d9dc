"""How the kernels are compiled: once, shared, made again where the cache is damaged, and done without."""

from __future__ import annotations

import logging
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.errors import ModelError, NativeUnavailable
from engine.loading import load_model
from engine.native.build import LIBRARY
from engine.native.library import NativeLibrary
from tests.models import tiny_model
from tests.unit.engine.driving import Reference, generate, prompt, request
from tests.unit.engine.native.building import COMPILING, build, build_in_process
from tests.unit.engine.native.kernels import library_or_skip


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_it_is_compiled_once_and_again_when_a_source_changes(cache, sources):
    first, was_compiled = build(sources)
    assert was_compiled
    assert build(sources) == (first, False)
    (sources / "answer.cpp").write_text('extern "C" int answer() { return 43; }\n')
    second, was_compiled = build(sources)
    assert was_compiled
    assert second != first


def test_two_processes_that_want_it_at_once_share_one_build(cache, sources):
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=build_in_process, args=(sources, ready, results)) for _ in range(2)]
    for process in processes:
        process.start()
    (one, one_compiled), (other, other_compiled) = results.get(timeout=60), results.get(timeout=60)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert one == other
    assert sorted([one_compiled, other_compiled]) == [False, True]


def put(path: Path, content: bytes) -> None:
    """In the place of a file that this process has loaded, and still executes when it ends."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


@pytest.mark.parametrize("damage", ["cut", "gone", "other bytes", "no manifest"])
def test_a_damaged_library_is_compiled_again(cache, sources, damage):
    path, _ = build(sources)
    whole = path.read_bytes()
    if damage == "cut":
        put(path, whole[:100])
    elif damage == "gone":
        path.unlink()
    elif damage == "other bytes":
        put(path, bytes(len(whole)))
    else:
        (path.parent / "manifest.json").unlink()
    again, was_compiled = build(sources)
    assert was_compiled
    assert again == path
    assert again.stat().st_size == len(whole)


def test_what_a_dead_process_left_behind_goes_with_the_next_build(cache, sources):
    path, _ = build(sources)
    left_over = path.parent.with_name(f"{path.parent.name}.abc123")
    left_over.mkdir()
    shutil.rmtree(path.parent)
    build(sources)
    assert not left_over.exists()
    assert [each.name for each in path.parent.iterdir() if each.suffix != ".json"] == [LIBRARY]


def test_a_source_that_does_not_compile_says_so_and_leaves_nothing(cache, sources):
    (sources / "answer.cpp").write_text("int answer() { return forty_two; }\n")
    with pytest.raises(NativeUnavailable, match="forty_two"):
        build(sources)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_a_library_without_our_functions_is_refused(cache, sources):
    path, _ = build(sources)
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        NativeLibrary(path)


def test_a_cache_that_cannot_be_written_is_told(cache, sources):
    cache.parent.parent.write_text("a file where a folder should be")
    with pytest.raises(NativeUnavailable, match="cache of kernels"):
        build(sources)


def test_auto_without_a_compiler_says_what_is_lost_and_gives_the_same_tokens(
    cache, no_compiler, tmp_path, caplog
):
    folder = tiny_model(tmp_path)
    with caplog.at_level(logging.WARNING):
        model = load_model(ModelConfig(id=str(folder), device="cpu"))
    (line,) = [each for each in caplog.messages if "kernels" in each]
    assert "half the speed" in line
    assert "no GNU C++ compiler" in line
    assert model.decoder is None
    assert model.library is None
    (tokens,) = generate(Engine(model, EngineConfig(num_blocks=16)), request(prompt(20), 8))
    assert tokens == Reference(folder).generate(prompt(20), 8)


def test_on_without_a_compiler_refuses_the_model(cache, no_compiler, tmp_path):
    with pytest.raises(ModelError, match=r"compile: on .* no GNU C\+\+ compiler"):
        load_model(ModelConfig(id=str(tiny_model(tmp_path)), device="cpu", compile="on"))


def test_on_refuses_a_type_that_the_kernels_do_not_compute_in(tmp_path):
    library_or_skip()
    with pytest.raises(ModelError, match=r"compile: on .*float16"):
        load_model(ModelConfig(id=str(tiny_model(tmp_path)), device="cpu", dtype="float16", compile="on"))


def test_off_looks_for_no_compiler_and_says_nothing(cache, no_compiler, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        model = load_model(ModelConfig(id=str(tiny_model(tmp_path)), device="cpu", compile="off"))
    assert model.decoder is None
    assert not [each for each in caplog.messages if "kernels" in each]


def test_loading_shows_that_kernels_are_compiled(tmp_path, monkeypatch):
    path = library_or_skip().path

    def compile_anew(progress: Callable[[str], None], load: Callable[[Path], object]) -> Path:
        progress(COMPILING)
        return path

    monkeypatch.setattr("engine.native.library.build_library", compile_anew)
    told: list[str] = []
    load_model(ModelConfig(id=str(tiny_model(tmp_path)), device="cpu", compile="on"), told.append)
    assert COMPILING in told
