from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.replication.storage.log import SegmentedLog
from tests.support.zookeeper import own_server, root, zookeeper, zookeeper_server

__all__ = ["own_server", "root", "zookeeper", "zookeeper_server"]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SegmentedLog]:
    opened = SegmentedLog(tmp_path / "log", segment_bytes=300)
    yield opened
    opened.close()
