"""The head of a GGUF file, which says what must follow it: key-value pairs, then each tensor's shape, type
and place. Source: the format's description in ggml-org/ggml (docs/gguf.md), version 2 and 3.

Only what tells whether the file is whole is kept; transformers reads the rest, in many seconds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import BrokenModel

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# Bytes of each plain kind of value, by its number.
_PLAIN_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_WANTED = ("general.architecture", "tokenizer.ggml.tokens")


def check_gguf(path: Path) -> None:
    """BrokenModel if the file ends before its last tensor, or has no tokenizer."""
    try:
        with path.open("rb") as file:
            keys, data_bytes = _read_head(file)
            data_begin = file.tell()
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror}") from error
    except (EOFError, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise BrokenModel(f"{path} is cut short, or no GGUF file") from error
    for wanted in _WANTED:
        if wanted not in keys:
            raise BrokenModel(f"{path} has no {wanted}")
    file_bytes = path.stat().st_size
    if file_bytes < data_begin + data_bytes:
        raise BrokenModel(f"{path} is cut short: {file_bytes} of {data_begin + data_bytes} bytes are there")


def _read_head(file: BinaryIO) -> tuple[set[str], int]:
    """The keys, and how many bytes of tensors follow; leaves the file where they begin."""
    if _take(file, 4) != _MAGIC or _number(file, "I") not in (2, 3):
        raise ValueError("not GGUF 2 or 3")
    num_tensors, num_pairs = _number(file, "Q"), _number(file, "Q")
    keys: set[str] = set()
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(num_pairs):
        key, kind = _string(file).decode(), _number(file, "I")
        keys.add(key)
        if key == "general.alignment":
            alignment = _number(file, "I")
        else:
            _skip(file, kind)
    data_bytes = max(_tensor_ends(file, num_tensors), default=0)
    file.seek(-file.tell() % alignment, 1)
    return keys, data_bytes


def _tensor_ends(file: BinaryIO, num_tensors: int) -> Iterator[int]:
    for _ in range(num_tensors):
        _string(file)  # its name
        shape = [_number(file, "Q") for _ in range(_number(file, "I"))]
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(_number(file, "I"))]
        yield _number(file, "Q") + prod(shape) // block_elements * block_bytes


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _string(file)
    elif kind == _ARRAY:
        item_kind, num_items = _number(file, "I"), _number(file, "Q")
        if item_kind in _PLAIN_BYTES:
            _take(file, num_items * _PLAIN_BYTES[item_kind])
        else:
            for _ in range(num_items):
                _skip(file, item_kind)
    else:
        _take(file, _PLAIN_BYTES[kind])


def _string(file: BinaryIO) -> bytes:
    return _take(file, _number(file, "Q"))


def _number(file: BinaryIO, kind: str) -> int:
    """I: 4 bytes, Q: 8 bytes, both unsigned."""
    (number,) = struct.unpack(f"<{kind}", _take(file, struct.calcsize(f"<{kind}")))
    return int(number)


def _take(file: BinaryIO, num_bytes: int) -> bytes:
    taken = file.read(num_bytes)
    if len(taken) < num_bytes:
        raise EOFError
    return taken
