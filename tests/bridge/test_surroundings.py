"""What a file of bridges does not say: other processes' bridges, own gateways, topics and channels that are not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bridge.catalog import Bridge, digest_of, read_bridges
from bridge.surroundings import others_text, own_gateways, with_other_bridges
from ops.bridges.commands import topic_problem
from pixiu.client.topics.topic_admin import TopicInfo
from pixiu.client.topics.topic_map import ChannelInfo
from pixiu.discovery.node import Node, NodeState
from pixiu.errors import UnknownTopic
from pixiu.ids import EndpointID

HOOK = 'kind = "to-webhook"\ntopic = "t"\nurl = "http://h/"\n'


def described(folder: Path, text: str) -> list[Bridge]:
    """The bridges of a file with this text."""
    (folder / "bridges.toml").write_text(text)
    return read_bridges(folder / "bridges.toml")


def node(role: str, endpoint: int, **more: object) -> Node:
    found = Node(role, -1, endpoint, NodeState.RUNNING, "127.0.0.1", 7000 + endpoint, 8000, EndpointID(endpoint), 1, "", "", 0)
    return replace(found, **more)  # type: ignore[arg-type]


def test_files_with_the_same_bridges_have_one_digest_and_others_are_named(tmp_path: Path) -> None:
    digest = digest_of(described(tmp_path, f"[a]\n{HOOK}[b]\n{HOOK}"))
    assert digest_of(described(tmp_path, f"# said otherwise\n[b]\n{HOOK}ordered = false\n[a]\n{HOOK}")) == digest
    other = digest_of(described(tmp_path, f"[a]\n{HOOK}[b]\n{HOOK}ordered = true\n"))
    assert other != digest
    nodes = [node("bridge", 1, files_digest=digest), node("bridge", 2, files_digest=other)]
    found = with_other_bridges([*nodes, node("bridge", 4, files_digest=digest)], EndpointID(1), digest)
    assert found == [nodes[1]], "not the process itself"
    assert "127.0.0.1:7001, 127.0.0.1:7002 have different bridges" in others_text(nodes[0], found)
    assert Node.from_json(nodes[1].to_json(), replica=2) == nodes[1]


@pytest.mark.parametrize("mqtt_host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_broker_that_is_an_own_gateway_is_named(tmp_path: Path, host: str, mqtt_host: str) -> None:
    broker = f'topic = "t"\nhost = "{host}"\nbroker_port = 1884\n'
    bridges = described(
        tmp_path,
        f'[out]\nkind = "to-mqtt"\n{broker}[in]\nkind = "from-mqtt"\nfilters = ["#"]\n{broker}'
        f'[far]\nkind = "to-mqtt"\n{broker.replace("1884", "1885")}[hook]\n{HOOK}'
        '[nowhere]\nkind = "to-mqtt"\ntopic = "t"\nhost = "no.such.host.invalid"\n',
    )
    gateways = [node("gateway", 5, mqtt_host=mqtt_host, mqtt_port=1884), node("gateway", 6)]
    found = await own_gateways(bridges, gateways)
    assert {name: "comes back for ever" in text for name, text in found.items()} == {"out": True, "in": True}
    assert f"{host}:1884 is gateway 5 of this cluster" in found["out"]
    assert await own_gateways(bridges, gateways[1:]) == {}


async def test_a_topic_or_channel_that_does_not_suit_is_said_with_what_to_do(tmp_path: Path) -> None:
    (bridge,) = described(tmp_path, f"[a]\n{HOOK}ordered = true\n")
    topics: dict[str, TopicInfo] = {}

    async def describe(name: str) -> TopicInfo:
        if name not in topics:
            raise UnknownTopic(name)
        return topics[name]

    assert "there is no topic t: `pixiu topic create t`" in await topic_problem(bridge, describe)
    topics["t"] = there = TopicInfo(name="t", id=1, version=1, parts=(), channels={}, deleted_at_ms=0)
    assert await topic_problem(bridge, describe) == "", "its channel will be made"
    topics["t"] = replace(there, deleted_at_ms=1)
    assert "is in the bin: `pixiu topic restore t`" in await topic_problem(bridge, describe)
    for ordered, problem in ((True, ""), (False, "channel bridge-a of topic t is not ordered")):
        topics["t"] = replace(there, channels={"bridge-a": ChannelInfo("bridge-a", ordered)})
        found = await topic_problem(bridge, describe)
        assert (problem in found, bool(found)) == (True, bool(problem))
    (source,) = described(tmp_path, '[a]\nkind = "from-mqtt"\ntopic = "t"\nhost = "h"\nfilters = ["#"]\n')
    assert await topic_problem(source, describe) == "", "a source has no channel"
