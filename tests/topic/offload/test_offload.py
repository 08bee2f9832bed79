"""The shell of the object store: which topics have one, and what is left of it once none has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.topics import entries as en
from pixiu.wire.levels import Triple
from tests.topic.builders import PART, TOPIC, Log
from topic.events import WriteReply
from topic.offload.offload import Offload
from topic.options import Options
from topic.state.parts import Verdict
from topic.stored import Stored


def shell(tmp_path: Path, log: Log, **options: Any) -> tuple[Offload, Any]:
    """A leader's shell over a store."""
    given = Options(data_dir=str(tmp_path), **options)
    context: Any = SimpleNamespace(
        options=given, view=SimpleNamespace(layout=SimpleNamespace(cluster="c1")), log=SimpleNamespace(), crash=pytest.fail
    )
    core = SimpleNamespace(stored=Stored(log.store.state), delivers=True)
    machine: Any = SimpleNamespace(opened=True, flush=pytest.fail)
    mending: Any = SimpleNamespace(given_up_at=lambda part, offset: 0)
    group: Any = SimpleNamespace(store=log.store, core=core)
    return Offload(context, group, machine, mending), core


@pytest.mark.parametrize(
    ("option", "settings", "url"),
    [
        ("", {}, ""),
        ("", {"store": "/mnt/a"}, "/mnt/a/c1"),
        ("/mnt/b/", {}, "/mnt/b/c1"),
        ("/mnt/b", {"store": "/mnt/a"}, "/mnt/a/c1"),
        ("/mnt/b", {"compact": 60}, ""),
    ],
)
def test_a_topic_has_its_own_store_or_the_servers_unless_it_is_compacted(
    tmp_path: Path, option: str, settings: dict[str, Any], url: str
) -> None:
    offload, _ = shell(tmp_path, Log(), store=option)
    assert offload.store_of(en.TopicSettings(TOPIC, "orders")._replace(**settings)) == url


async def test_nothing_waits_once_no_topic_has_a_store(tmp_path: Path) -> None:
    log = Log()
    log.topic(store=str(tmp_path / "away"))
    log.open_part()
    log.write(1, 1)
    log.store.flush()
    offload, core = shell(tmp_path, log)
    offload.leader_changed(1)
    await offload.look()
    assert offload.samples()["store_waiting_bytes"]
    part = log.store.state.parts[PART]
    assert offload.describe(part) is not None
    core.stored.hold = "held"
    log.topic(store="")
    await offload.look()
    assert (offload.samples()["store_waiting_bytes"], offload.oldest_s, offload.text) == (0, 0.0, "")
    assert offload.describe(part) is None
    await offload.close()


async def test_a_compacted_topic_is_not_uploaded_though_the_servers_have_a_store(tmp_path: Path) -> None:
    log = Log()
    log.topic(compact=60)
    log.open_part()
    log.write(1, 1)
    log.apply(en.SEAL, en.encode_seal(PART, ()))
    log.store.flush()
    offload, _ = shell(tmp_path, log, store=str(tmp_path / "store"))
    offload.leader_changed(1)
    await offload.look()
    assert not offload._tasks
    assert offload.describe(log.store.state.parts[PART]) is None
    await offload.close()


async def test_a_store_that_cannot_be_opened_is_told_to_who_waits_for_it(tmp_path: Path) -> None:
    log = Log()
    log.topic(store="foo://bar")
    log.open_part()
    log.write(1, 1)
    log.store.flush()
    offload, core = shell(tmp_path, log, store_segment_mb=1)
    told = asyncio.get_running_loop().create_future()
    offload._group.step = lambda event: None if told.done() else told.set_result(event)  # type: ignore[method-assign]
    core.stored.keep(PART, 2, WriteReply(1, 1, Triple(1, 1, 1), 2, 0, Verdict.STORED))
    offload.leader_changed(1)
    offload._machine.flush = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    await offload.look()
    async with asyncio.timeout(60):
        event = await told
    assert event.part == PART
    assert "foo://bar/c1" in event.refusal.text
    assert event.refusal.code == "OUTCOME_UNKNOWN"
    assert list(core.stored.unusable) == ["foo://bar/c1"]
    await offload.close()
