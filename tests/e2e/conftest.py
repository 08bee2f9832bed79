"""One cluster for the tests of a module: the defaults of `pixiu up`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import LAYOUT, LocalCluster, running_cluster
from tests.support.roles import roles
from tests.support.zookeeper import own_server, zookeeper_server

__all__ = ["own_server", "roles", "zookeeper_server"]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two partitions of two brokers and of two routers, two proxies, two gateways; in the module's own `LAYOUT` if it has one."""
    layout = getattr(request.module, "LAYOUT", LAYOUT)
    with running_cluster(tmp_path_factory.mktemp("cluster"), "--brokers=2", "--routers=2", layout=layout) as running:
        yield running
