"""The table of scenarios of the SDKs: every language's driver knows it, and plays a portion of it against a small cluster.

`python -m tests.clients.scenarios --language python` plays the whole table, with processes that are killed; so for others.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

import pixiu
from tests.clients.scenarios.driver import LANGUAGES, Driver, Language
from tests.clients.scenarios.favours import Favours
from tests.clients.scenarios.table import scenarios
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.effort import portion

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
PLAYED = portion(each.name for each in scenarios() if each.cluster == "any")


@pytest.fixture(scope="module", params=sorted(LANGUAGES))
def language(request: pytest.FixtureRequest) -> Language:
    """A language with its driver built. Skips those whose tools or modules are not there."""
    name: str = request.param
    found = LANGUAGES[name]
    if name == "go":
        if shutil.which("go") is None:
            pytest.skip("needs Go")
        done = subprocess.run(["go", "mod", "download"], cwd=found.folder, capture_output=True, text=True, timeout=200, check=False)
        if done.returncode:
            pytest.skip(f"Go's modules cannot be had: {done.stderr[-200:]}")
    if name == "typescript" and not (found.folder / "node_modules").is_dir():
        pytest.skip("needs Node, and `npm ci` in sdk/typescript")
    found.prepare()
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Every role once."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), "--xius=1", "--pis=1", "--topics=1", layout="small") as cluster:
        cluster.wait_healthy()
        yield cluster


def test_the_table_has_each_scenario_once() -> None:
    names = [each.name for each in scenarios()]
    assert len(names) >= 70
    assert len(set(names)) == len(names)


def test_the_driver_knows_the_whole_table_and_nothing_else(language: Language) -> None:
    assert language.names() == sorted(each.name for each in scenarios())


def test_a_portion_of_the_table_holds(language: Language, small: LocalCluster) -> None:
    async def play() -> dict[str, str]:
        found: dict[str, str] = {}
        async with Driver(language, small.target) as driver:
            for name in PLAYED:
                async with Favours(small, lambda uin: pixiu.connect(small.target, uin=uin)) as favours:
                    found[name] = await driver.play(name, time.time_ns() // 1_000_000 * 1_000, favours)
        return {name: why for name, why in found.items() if why != "ok"}

    assert asyncio.run(play()) == {}
