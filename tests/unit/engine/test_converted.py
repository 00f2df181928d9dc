"""The cache of converted models: one conversion for all who ask, and never a folder that is not whole."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from engine import gguf
from engine.converted import convert_gguf
from engine.errors import BrokenModel, ModelError, UnsupportedModel
from engine.gguf_file import check_gguf
from engine.manifest import MANIFEST
from engine.weights import no_progress, resolve_model

ROOT = Path(__file__).parents[3]


def write_gguf(path: Path, rows: int = 4, tokens: list[str] | None = None) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_array("test.numbers", [1.5, 2.5])
    writer.add_bool("test.flag", True)
    if tokens is not None:
        writer.add_token_list(tokens)
    for name in ("a", "b"):
        writer.add_tensor(name, np.ones((rows, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pdserve"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", tokens=["a", "b"])


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversions that really ran; each takes a moment, and writes two files."""
    folders: list[Path] = []

    def write_folder(_: Path, folder: Path) -> None:
        folders.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(os.urandom(5000))

    monkeypatch.setattr(gguf, "write_folder", write_folder)
    return folders


def convert(path: Path) -> Path:
    return convert_gguf(path, no_progress)


def together(num: int, action: Callable[[], Path]) -> list[Path]:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(action())) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == num
    return results


def test_parallel_starts_share_one_conversion(source, written, tmp_path):
    folders = together(4, lambda: convert(source))
    assert len(written) == 1
    assert len(set(folders)) == 1
    assert (folders[0] / "config.json").is_file()
    other = write_gguf(tmp_path / "other.gguf", rows=5, tokens=["a", "b"])
    assert convert(other) != folders[0]


def test_weights_that_differ_in_the_middle_of_a_file_only_are_other_weights(tmp_path, written):
    """Of a model trained in some layers, written again to the same file."""
    path = write_gguf(tmp_path / "model.gguf", rows=2**17, tokens=["a", "b"])
    folder = convert(path)
    data = bytearray(path.read_bytes())
    begin, end = 3 * 2**20, 3 * 2**20 + 2**16
    assert len(data) > end + 2**22
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)
    assert convert(path) != folder
    assert len(written) == 2


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "hurt"),
    [
        ("model.safetensors", _cut),
        ("model.safetensors", _flip),
        ("model.safetensors", Path.unlink),
        ("config.json", lambda path: path.write_text("[]")),
        (MANIFEST, Path.unlink),  # the folder of a conversion that never ended
        (MANIFEST, _cut),
        (MANIFEST, lambda path: path.write_text("[]")),
    ],
)
def test_a_damaged_entry_is_found_and_made_again_once(source, written, cache, name, hurt):
    folder = convert(source)
    assert convert(source) == folder
    assert len(written) == 1
    hurt(folder / name)
    told: list[str] = []
    assert together(3, lambda: convert_gguf(source, told.append)) == [folder] * 3
    assert len(written) == 2
    assert [line for line in told if "made again" in line]
    assert convert(source) == folder
    assert len(written) == 2
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_a_damaged_entry_that_cannot_be_made_again_stays_and_is_never_used(source, written, monkeypatch):
    folder = convert(source)
    _cut(folder / "model.safetensors")

    def fail(*_: Path) -> None:
        raise UnsupportedModel("no")

    monkeypatch.setattr(gguf, "write_folder", fail)
    for _ in range(2):
        with pytest.raises(UnsupportedModel):
            convert(source)
    assert folder.is_dir()


def test_a_file_that_is_cut_anywhere_is_named_and_leaves_nothing_behind(source, tmp_path, cache):
    whole = source.read_bytes()
    check_gguf(source)
    for length in (0, 3, 4, 8, 23, 40, 60, len(whole) // 2, len(whole) - 33, len(whole) - 1):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(BrokenModel, match=r"cut\.gguf is cut short"):
            resolve_model(str(path))
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


@pytest.mark.parametrize("content", [b"no model", b"\xff" * 200, b"GGUF" + b"\x09\0\0\0" * 50])
def test_a_file_that_is_no_gguf_is_named(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(BrokenModel, match=r"model\.gguf is cut short, or no GGUF"):
        resolve_model(str(path))


def test_a_gguf_without_a_tokenizer_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    with pytest.raises(BrokenModel, match=r"model\.gguf has no tokenizer\.ggml\.tokens"):
        resolve_model(str(path))


def test_a_gguf_that_transformers_cannot_read_is_refused_in_one_line(source, cache):
    with pytest.raises(UnsupportedModel, match=r"cannot read .*model\.gguf") as caught:
        resolve_model(str(source))
    assert "\n" not in str(caught.value)
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_a_cache_that_cannot_be_made_is_named(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="file/pdserve"):
        convert(source)


def test_a_hit_loads_neither_torch_nor_transformers(source, written):
    convert(source)
    script = (
        "import sys; from engine.weights import resolve_model; resolve_model(sys.argv[1]); "
        "print(*({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(source)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, "", "")
