"""A name for a model that is equal for two workers exactly if their KV can be exchanged."""

from __future__ import annotations

import json
import struct
from hashlib import blake2b
from pathlib import Path

# Of each tensor; any training, merge or quantisation shows in the first bytes of some tensor.
_SAMPLE_BYTES = 4096
# What changes nothing in the numbers.
_VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})


def model_fingerprint(folder: Path, dtype: str) -> str:
    """Of the config, every tensor's name, type, shape and first bytes, and the dtype it runs in. How the
    tensors are spread over files does not matter.
    """
    digest = blake2b(dtype.encode(), digest_size=16)
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    tensors: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= _tensor_samples(path)
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name])
    return digest.hexdigest()


def _tensor_samples(path: Path) -> dict[str, bytes]:
    """A safetensors file is: header length (u64, little-endian), JSON header, data."""
    samples: dict[str, bytes] = {}
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            file.seek(8 + header_bytes + begin)
            samples[name] = f"{entry['dtype']}{entry['shape']}".encode() + file.read(
                min(_SAMPLE_BYTES, end - begin)
            )
    return samples
