"""`pixiu up --pis`: inboxes in a whole cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.cluster import WAIT_S, running_cluster
from tests.support.pi import Lost, PiClient, appends, message

pytestmark = pytest.mark.e2e


def test_pixiu_up_runs_replicas_of_pi_and_the_leader_takes_appends(tmp_path: Path) -> None:
    one = [f"--{name}=1" for name in ("proxies", "gateways", "brokers", "broker-replicas", "routers", "router-replicas", "pis")]
    with running_cluster(tmp_path, *one, "--relays=0", "--pi-replicas=2") as cluster:
        cluster.wait_healthy()
        addresses = [str(process["address"]) for process in cluster.processes("pi")]
        assert len(addresses) == 2

        async def append() -> int:
            async with asyncio.timeout(WAIT_S):
                while True:
                    for address in addresses:
                        client = PiClient(address)
                        try:
                            epoch = (await client.ask()).epoch
                            reply = await client.ask(appends(epoch, (message(1), 7)))
                            if not reply.code:
                                assert list(reply.results) == [1]
                                return reply.copies
                            assert reply.code == "NOT_LEADER"
                        except Lost:
                            continue
                        finally:
                            await client.close()
                    await asyncio.sleep(0.1)

        assert asyncio.run(append()) in (1, 2)
