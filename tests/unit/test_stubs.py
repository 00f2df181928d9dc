"""The committed stubs are what the protos say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc_tools")

ROOT = Path(__file__).parents[2]
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def test_stubs_are_generated_from_the_protos_of_today(tmp_path: Path) -> None:
    protos = sorted((ROOT / "proto/pdserve/v1").glob("*.proto"))
    plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto")]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command += [f"--mypy_grpc_out=quiet:{tmp_path}", f"--plugin=protoc-gen-mypy_grpc={plugin}"]
    subprocess.run([*command, *map(str, protos)], check=True)
    for name in [proto.stem + suffix for proto in protos for suffix in SUFFIXES]:
        generated = (tmp_path / "pdserve/v1" / name).read_text()
        assert (ROOT / "pdserve/v1" / name).read_text() == generated, f"{name}: run `make proto`"
