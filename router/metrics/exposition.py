"""Several processes' metrics as one exposition, in Prometheus' text format.

Each line of a sample gets the labels of who said it; the families of one name are put together. Lines are not
taken apart further: this runs on the loop that streams tokens, and parsing would cost ten times as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# When a histogram began is of no use to anybody, and a family for each.
_LEFT_OUT = "_created"


@dataclass(slots=True)
class _Family:
    help: str
    type: str
    samples: list[str] = field(default_factory=list)


class Exposition:
    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def add(self, text: str, labels: Mapping[str, str]) -> None:
        """`text` is one process's exposition; a label that it has already is in `labels` not again. A family
        whose type another process saw differently is left out, and so is what stands in no family."""
        said = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        family: _Family | None = None
        help = ""
        for line in text.split("\n"):
            if line.startswith("# HELP "):
                help, family = line, None
            elif line.startswith("# TYPE "):
                family = self._family(line, help)
                help = ""
            elif line and family is not None and not line.startswith("#"):
                family.samples.append(_with_labels(line, said))

    def _family(self, line: str, help: str) -> _Family | None:
        """By its TYPE line, which follows its HELP line."""
        parts = line.split()
        if len(parts) != 4 or parts[2].endswith(_LEFT_OUT):
            return None
        family = self._families.setdefault(parts[2], _Family(help, line))
        return family if family.type == line else None

    def render(self) -> str:
        lines: list[str] = []
        for family in self._families.values():
            if family.samples:
                lines += [family.help, family.type] if family.help else [family.type]
                lines += family.samples
        return "".join(f"{line}\n" for line in lines)


def _with_labels(line: str, said: str) -> str:
    """`name 1` and `name{a="b"} 1` alike. A name has neither a brace nor a space in it."""
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f"{name}{{{said}{'' if rest.startswith('}') else ','}{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{said}}} {value}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
