"""The scenarios of `sdk/scenarios.md`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[3]
PAGE: Final = ROOT / "sdk/scenarios.md"
_ROW: Final = re.compile(r"\| `([a-z]+/[a-z_]+)` \| (any|harm|secure) \| (.+) \|")


class Scenario(NamedTuple):
    """A row of the table."""

    name: str
    cluster: str
    """"any", "harm" (it kills or drains processes), or "secure" (TLS and tokens)."""
    holds: str


def scenarios() -> list[Scenario]:
    """Parse the table. Raises ValueError for a row that is none."""
    table = PAGE.read_text().partition("\n| scenario |")[2].splitlines()[2:]
    found = [_ROW.fullmatch(line) for line in table]
    wrong = [line for line, row in zip(table, found, strict=True) if row is None]
    if wrong or not found:
        raise ValueError(f"{PAGE}: no row of the table: {wrong[:1]}")
    return [Scenario(*row.groups()) for row in found if row is not None]
