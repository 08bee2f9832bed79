"""The SDK in Go: its table of scenarios, the test vectors, and some scenarios against a small cluster. The whole table is played by
`python -m tests.clients.scenarios --language go`."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

import pixiu
from tests.clients.scenarios.driver import LANGUAGES, Driver, Language
from tests.clients.scenarios.favours import Favours
from tests.clients.scenarios.table import ROOT, scenarios
from tests.docs.snippets import snippets
from tests.support.cluster import LocalCluster, running_cluster

GO = shutil.which("go")
needs_go = pytest.mark.skipif(GO is None, reason="needs Go")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SOME = (
    "publish/confirmed",
    "signal/receipt",
    "inbox/ack_survives_reconnect",
    "topics/channel_reject_to_dead_letters",
    "interop/rooms",
    "interop/mail",
)


@pytest.fixture(scope="module")
def language() -> Language:
    """Go with its driver built. Skips where the modules cannot be had."""
    folder = LANGUAGES["go"].folder
    done = subprocess.run(["go", "mod", "download"], cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        pytest.skip(f"Go's modules cannot be had: {done.stderr[-200:]}")
    LANGUAGES["go"].prepare()
    return LANGUAGES["go"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Every role once."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), "--xius=1", "--pis=1", "--topics=1", layout="small") as cluster:
        cluster.wait_healthy()
        yield cluster


def test_the_table_has_each_scenario_once() -> None:
    names = [each.name for each in scenarios()]
    assert len(names) >= 40
    assert len(set(names)) == len(names)


def test_its_page_names_what_is_there() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "sdk/go").glob("*.go"))
    names = set(re.findall(r"^func (?:\(\w+ \*?\w+\) )?([A-Z]\w*)|^type ([A-Z]\w*)|^\t([A-Z]\w*)", sources, re.MULTILINE))
    known = {name for each in names for name in each if name}
    used = {name for found in snippets() if found.language == "go" for name in re.findall(r"\.([A-Z]\w*)", found.text)}
    assert len(used) > 20
    assert used - known == {"Is", "Println", "Second"}


@needs_go
def test_the_driver_knows_the_whole_table_and_nothing_else(language: Language) -> None:
    assert language.names() == sorted(each.name for each in scenarios())


@needs_go
def test_its_own_tests_pass_and_its_codec_makes_the_vectors(language: Language) -> None:
    environment = {**os.environ, "PIXIU_VECTORS": str(ROOT / "proto/vectors.json")}
    command = ["go", "test", ".", "./internal/codec"]
    done = subprocess.run(command, cwd=language.folder, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_go
@pytest.mark.parametrize("name", SOME)
def test_scenario(language: Language, small: LocalCluster, name: str) -> None:
    async def play() -> str:
        async with (
            Favours(small, lambda uin: pixiu.connect(small.target, uin=uin)) as favours,
            Driver(language, small.target) as driver,
        ):
            return await driver.play(name, 1_000_000 * (1 + SOME.index(name)), favours)

    assert asyncio.run(play()) == "ok"
