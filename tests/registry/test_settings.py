"""Settings in a real registry: written with their history, by many at once, and watched through the loss of a session."""

from __future__ import annotations

import asyncio

import pytest

from cluster.settings.live_settings import Settings
from pixiu.discovery import paths
from pixiu.discovery.zookeeper import ZooKeeper
from registry.mailbox import Mailbox
from registry.settings import AUDIT_LINES, change_settings, read_changes, read_settings
from tests.support.waiting import until

pytestmark = pytest.mark.zookeeper


async def test_changes_are_kept_with_who_made_them_and_none_is_lost(zookeeper: ZooKeeper, root: str) -> None:
    assert await read_settings(zookeeper, root) == Settings()
    assert await read_changes(zookeeper, root) == []
    await asyncio.gather(*(change_settings(zookeeper, root, {f"proxy.k{i}": i}, f"op{i}") for i in range(5)))
    settings, differs = await change_settings(zookeeper, root, {"proxy.k0": None, "proxy.k1": 1, "proxy.gone": None}, "last")
    assert (settings.version, differs) == (6, {"proxy.k0": None})
    assert settings.values == {f"proxy.k{i}": i for i in range(1, 5)}
    assert await change_settings(zookeeper, root, {"proxy.k1": 1}, "nobody") == (settings, {}), (
        "nothing changes, nothing is written"
    )
    lines = await read_changes(zookeeper, root)
    assert [line["version"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {line["operator"] for line in lines} == {"op0", "op1", "op2", "op3", "op4", "last"}
    assert lines[-1]["settings"] == {"proxy.k0": None}
    for number in range(AUDIT_LINES):
        await change_settings(zookeeper, root, {"all.log_level": str(number)}, "many")
    assert len(await read_changes(zookeeper, root)) == AUDIT_LINES


async def test_who_watches_is_told_at_the_start_and_of_every_change(zookeeper: ZooKeeper, root: str) -> None:
    told: list[bytes] = []
    watch = Mailbox(zookeeper, paths.settings(root), told.append)
    watch.start()

    async def knows(version: int) -> bool:
        return bool(told) and (Settings.from_json(told[-1]).version if told[-1] else 0) == version

    await until(lambda: knows(0), "the start")
    for version in (1, 2):
        await change_settings(zookeeper, root, {"all.log_level": str(version)}, "test")
        await until(lambda version=version: knows(version), f"version {version}")  # type: ignore[misc]
    await zookeeper.delete(paths.settings(root))
    await until(lambda: knows(0), "the node is gone")
    await watch.stop()
