"""paho and Mosquitto's clients play the script of `tests/clients` through a cluster, with MQTT 3.1.1 and 5."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from functools import partial

import pytest

from tests.clients.mosquitto_client import MosquittoClient
from tests.clients.paho_client import PahoClient
from tests.clients.script import Client, Script, Where
from tests.support.cluster import LocalCluster

LAYOUT = "nodes"
CHECKS = ("connect", "qos0", "qos1", "qos2", "wildcard", "retained", "will", "shared")
WITHOUT = ("resume",)
"""This cluster has no stores, so that sessions end with their connections; `test_sessions.py` resumes them."""


async def play(cluster: LocalCluster, make: Callable[[Where, str], Client]) -> None:
    """The script at each gateway, with a version each, at the same time."""
    versions = zip(cluster.mqtt_ports(), ("3.1.1", "5"), strict=True)
    places = [Where("127.0.0.1", port, "tcp", version, "") for port, version in versions]
    found = await asyncio.gather(*(Script(partial(make, where)).run(WITHOUT) for where in places))
    assert found == [dict.fromkeys(CHECKS, "ok")] * 2


async def test_paho_plays_the_script(cluster: LocalCluster) -> None:
    await play(cluster, PahoClient)


@pytest.mark.skipif(shutil.which("mosquitto_sub") is None, reason="mosquitto-clients are not installed")
async def test_mosquittos_clients_play_the_script(cluster: LocalCluster) -> None:
    await play(cluster, MosquittoClient)


async def test_sessions_lists_the_clients_of_all_gateways_by_their_ids(cluster: LocalCluster) -> None:
    clients = [
        PahoClient(Where("127.0.0.1", port, "tcp", version, ""), f"listed-{number}")
        for number, (port, version) in enumerate(zip(cluster.mqtt_ports(), ("3.1.1", "5"), strict=True))
    ]
    for client in clients:
        await client.connect()
    try:
        done = await asyncio.to_thread(cluster.pixiu, "sessions", "--client", "listed-", "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert {(each["client"], each["protocol"], each["backlog"]) for each in said["sessions"]} == {
            ("listed-0", "mqtt 3", 0), ("listed-1", "mqtt 5", 0),
        }  # fmt: skip
        assert len({each["gateway"] for each in said["sessions"]}) == 2
        one = await asyncio.to_thread(cluster.pixiu, "sessions", "--client", "listed-1")
        assert "listed-1" in one.stdout
        assert "listed-0" not in one.stdout
    finally:
        for client in clients:
            await client.disconnect()
