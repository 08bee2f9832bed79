"""mypy knows what Python makes of a frozenset and the keys of a dict (`scripts/mypy_frozensets.py`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mypy import api

CONFIG = Path(__file__).parents[1] / "setup.cfg"
SOURCE = """\
a = frozenset({1})
b: frozenset[int] = a | {2}
c: frozenset[int] = a | b | frozenset({2: 3})
d: frozenset[int] = a | {2: 3}.keys()
e: frozenset[int] = a - {2: 3}.keys()
f: set[int] = a & {2: 3}.keys()
"""


@pytest.mark.slow
def test_a_frozenset_with_the_keys_of_a_dict_is_a_set(tmp_path: Path) -> None:
    found: dict[str, object] = {}
    exec(SOURCE, found)
    assert [type(found[name]) for name in "bcdef"] == [frozenset, frozenset, set, set, set]
    path = tmp_path / "made.py"
    path.write_text(SOURCE)
    out, _, _ = api.run(["--config-file", str(CONFIG), "--cache-dir", os.devnull, "--no-error-summary", str(path)])
    assert [line.split(":")[1] for line in out.splitlines()] == ["4", "5"], out
