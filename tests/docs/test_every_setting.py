"""The table of every setting in the operator's page holds each once, and says of each whether it must agree."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

from cluster.settings.fields import specs
from cluster.settings.options import WIRE_DEFAULTS, ClusterOptions, RoleOptions
from pixiu.discovery.paths import ROLES

PAGE = Path(__file__).resolve().parents[2] / "docs/operations.md"
ROW = re.compile(r"^\| `\[(.+?)\]` \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def rows() -> list[tuple[str, list[str], str]]:
    """(table, settings, whether they may differ) of each row."""
    _, _, section = PAGE.read_text().partition("\n### Every setting\n")
    section = section.partition("\n## ")[0]
    return [(table, re.findall(r"`(\w+)`", settings), differ) for table, settings, differ, _ in ROW.findall(section)]


def test_every_setting_is_in_the_table_once() -> None:
    common = set(specs(RoleOptions))
    wanted = {("cluster", key) for key in specs(ClusterOptions)} | {("all roles", key) for key in common}
    for role in ROLES:
        options: type[RoleOptions] = importlib.import_module(f"{role}.options").Options
        wanted |= {(role, key) for key in specs(options) if key not in common}
    found = Counter((table, key) for table, settings, _ in rows() for key in settings)
    assert set(found) == wanted
    assert not [setting for setting, times in found.items() if times != 1]


def test_what_must_agree_is_what_the_wire_hash_covers() -> None:
    agreeing = {(table, key) for table, settings, differ in rows() if differ == "must agree" for key in settings}
    assert agreeing == {("cluster", key) for key in WIRE_DEFAULTS}
    assert all(differ.startswith(("must agree", "per process")) for _, _, differ in rows())
