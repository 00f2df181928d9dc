"""What a finished folder holds: every file's size and hash, written last, beside the files.

A folder whose manifest is missing was never finished; one that differs from it was damaged since. The hash
is there for discs and half-made copies, not for enemies: who may write the folder may write the manifest.
"""

from __future__ import annotations

import json
from pathlib import Path

from xxhash import xxh3_128

MANIFEST = "manifest.json"
_READ_BYTES = 2**22


def write_manifest(folder: Path) -> None:
    files = {path.name: _entry(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(files, indent=1))


def damage(folder: Path, needed: str | None = None) -> str | None:
    """What is wrong with a folder, in words; None if it is as it was written and has the file that is
    `needed`. Reads every byte.
    """
    try:
        files = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return "it was never finished"
    except (ValueError, IsADirectoryError):
        return f"its {MANIFEST} is damaged"
    if not isinstance(files, dict):
        return f"its {MANIFEST} is damaged"
    if needed is not None and needed not in files:
        return f"it has no {needed}"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            entry = _entry(path)
        except FileNotFoundError:  # somebody who holds the lock puts another folder in this one's place
            return f"{name} was taken away"
        if entry != expected:
            return f"{name} is damaged"
    return None


def _entry(path: Path) -> dict[str, int | str]:
    digest = xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}
