"""The header of a safetensors file, which says what must follow it: header length (u64, little-endian), a
JSON header, and as many bytes of data as the header names. Source: the format's description in
huggingface/safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BrokenModel

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    # In the file, from its first byte.
    begin: int
    end: int


def read_entries(path: Path) -> Mapping[str, TensorEntry]:
    """Name → what and where. BrokenModel if the file is not the one that its header describes."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            data_begin = _LENGTH_BYTES + header_bytes
            if header_bytes > _MAX_HEADER_BYTES or data_begin > file_bytes:
                raise BrokenModel(
                    f"{path} is cut short, or no safetensors file: its header does not fit in it"
                )
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        entries = {name: _entry(entry, data_begin) for name, entry in header.items()}
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise BrokenModel(f"{path} is no safetensors file: its header cannot be read") from error
    expected = max((entry.end for entry in entries.values()), default=data_begin)
    if file_bytes != expected:
        raise BrokenModel(f"{path} has {file_bytes} bytes where its header asks for {expected}")
    return entries


def _entry(fields: Mapping[str, str | list[int]], data_begin: int) -> TensorEntry:
    begin, end = (int(offset) for offset in fields["data_offsets"])
    shape = tuple(int(size) for size in fields["shape"])
    return TensorEntry(str(fields["dtype"]), shape, data_begin + begin, data_begin + end)
