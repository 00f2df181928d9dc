"""A name for a model that is equal for two workers exactly if their KV can be exchanged."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

from engine.safetensors_file import read_entries

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
    samples: dict[str, bytes] = {}
    with path.open("rb") as file:
        for name, entry in read_entries(path).items():
            file.seek(entry.begin)
            head = file.read(min(_SAMPLE_BYTES, entry.end - entry.begin))
            samples[name] = f"{entry.dtype}{list(entry.shape)}".encode() + head
    return samples
