"""Inputs that the fuzz tests play first: `tests/fuzz/corpus/TARGET/NAME.hex`.

A file is a line that describes the input, `# …`; `count: N` where the input is a batch; and the bytes in hexadecimal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "fuzz" / "corpus"


@dataclass(frozen=True)
class Seed:
    """An input, and the count that comes with it."""

    name: str
    data: bytes
    count: int


def seeds(target: str) -> list[Seed]:
    """Return the inputs of a fuzz target, by name."""
    found = []
    for path in sorted((FOLDER / target).glob("*.hex")):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        counts = [int(line.removeprefix("count: ")) for line in lines if line.startswith("count: ")]
        data = bytes.fromhex("".join(line for line in lines if not line.startswith("count: ")))
        found.append(Seed(path.stem, data, counts[0] if counts else 1))
    assert found, f"no corpus for {target}"
    return found
