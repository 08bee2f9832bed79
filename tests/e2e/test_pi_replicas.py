"""Two Pi replicas of one partition as processes of their own: a leader is killed again and again, a damaged one is repaired."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from pi.keys import CHUNK_ENTRIES, chunk_key
from pixiu.wire.inbox_operations import USER_DEVICE, OpenSessions
from pixiu.wire.v1 import pi_pb2
from tests.support.pi import UIN, Lost, PiClient, Sender, appends, inbox, message
from tests.support.repairs import repair
from tests.support.roles import Roles
from tests.support.stores import figures, health, leader_of, wait_in_sync
from tests.support.waiting import until
from tools.cli.main import application

pytestmark = pytest.mark.e2e
ROUNDS = int(os.environ.get("PIXIU_KILL_ROUNDS", "2"))
"""After two rounds each replica has led and was killed."""
NAMES = ("pi-a", "pi-b")


@pytest.mark.timeout(120 + 60 * ROUNDS)
async def test_a_leader_killed_again_and_again_loses_nothing_and_repeats_nothing(roles: Roles) -> None:
    settings: dict[str, Any] = {"partition": 0, "flush_interval_s": 0.1, "inbox_cap": 10_000_000}  # nothing goes by the cap
    await roles.layout(pi=1)
    for name in NAMES:
        roles.start(name, **settings)
    leader = await wait_in_sync(roles, *NAMES)
    alive = set(NAMES)
    sender = Sender(roles, alive)
    await sender.more(100)
    times: list[float] = []
    for _ in range(ROUNDS):
        alive.discard(leader)
        epoch = sender.epoch
        roles.send_signal(leader, signal.SIGKILL)
        times.append(await sender.more(1, epoch))
        roles.start(leader, **settings)
        alive.add(leader)
        leader = await wait_in_sync(roles, *NAMES)
    await sender.more(100)
    await sender.stop()
    exit_code, compared = await repair(roles, "--role", "pi")
    assert exit_code == 0, compared
    assert [(each["damaged"], each["differed"]) for each in compared["replicas"]] == [(0, 0), (0, 0)]
    found = await inbox(roles, leader)
    said = figures("from a kill to the next acknowledgement", times)
    print(f"{said}; rounds {ROUNDS}, acknowledged {len(sender.known)}, stored {len(found)}")
    assert [seq for seq, _ in found] == list(range(1, len(found) + 1))
    assert len({msg_id for _, msg_id in found}) == len(found) <= sender.sent
    assert [msg_id for _, msg_id in found] == sorted(msg_id for _, msg_id in found)
    by_id = {msg_id: seq for seq, msg_id in found}
    assert {msg_id: by_id.get(msg_id) for msg_id in sender.known} == sender.known


def rot(roles: Roles, name: str) -> None:
    """The first chunk of the inbox, which holds entry 10, is another one in a replica's file."""
    (file,) = (roles.folder / name).rglob("data.mdb")
    data, key = bytearray(file.read_bytes()), chunk_key(UIN, 1, 10)
    at = data.find(key)
    assert at >= 0
    while at >= 0:
        data[at + len(key) + 2] ^= 1
        at = data.find(key, at + 1)
    file.write_bytes(data)


async def stands(roles: Roles, epoch: int) -> bool:
    """Whether the leader refuses mail because it cannot apply what came before, and still serves what it has."""
    for node in await roles.running(*NAMES):
        client = PiClient(node.address)
        try:
            mail = await client.ask(appends(epoch, (message(5000), UIN + 1), generation=3000))
            if mail.code == "STATE_DAMAGED":
                reply = await client.ask(reads=[pi_pb2.PiRead(uin=UIN + 1, lane=1, num=10, peek=True)])
                assert [list(each.msg_ids) for each in reply.reads] == [[message(4000)]], reply
                return True
        except Lost:
            pass
        finally:
            await client.close()
    return False


async def test_what_is_broken_on_all_replicas_is_named_until_an_operator_gives_it_up(roles: Roles) -> None:
    await roles.layout(pi=1)
    settings: dict[str, Any] = {"partition": 0, "flush_interval_s": 0.1, "scrub_keys_per_s": 100_000}
    for name in NAMES:
        roles.start(name, **settings)
    await wait_in_sync(roles, *NAMES)
    sender = Sender(roles, set(NAMES))
    await sender.more(100)
    await sender.stop()
    for name in NAMES:
        roles.send_signal(name, signal.SIGTERM)
        assert await roles.ended(name) == 0
    for name in NAMES:
        rot(roles, name)
        roles.start(name, **settings)

    async def both_say_so() -> bool:
        nodes = [node for name in NAMES if (node := await roles.node(name)) is not None]
        said = [str((await health(node)).get("degraded")) for node in nodes]
        return len(said) == 2 and all(f"entries 1 to {CHUNK_ENTRIES} of lane 1" in text and "--drop" in text for text in said)

    leader = await wait_in_sync(roles, *NAMES)
    await until(both_say_so, "both replicas name the damage, and none of them takes the other's")
    (node,) = await roles.running(leader)
    client = PiClient(node.address)
    epoch = (await client.ask()).epoch
    assert not (await client.ask(appends(epoch, (message(4000), UIN + 1), generation=2000))).code
    met = await client.ask(appends(epoch, (message(10), UIN), generation=2000))  # a repeat is looked for in the broken chunk
    assert met.code == "OUTCOME_UNKNOWN", met
    await client.close()
    await until(lambda: stands(roles, epoch), "the partition stands before that entry, and reads go on")
    roles.send_signal(leader, signal.SIGKILL)  # in its next life it is the same
    roles.start(leader, **settings)
    leader = await wait_in_sync(roles, *NAMES)
    await until(lambda: stands(roles, epoch), "the partition stands before that entry in the next life")
    command = ["repair", "--role", "pi", "--partition", "0", "--target", roles.target(), "--json"]
    said = await asyncio.to_thread(CliRunner().invoke, application(), [*command, "--drop", "--reason", "test", "--yes"])
    while "has no leader" in said.stdout:  # it may change hands once more on a busy machine
        await wait_in_sync(roles, *NAMES)
        said = await asyncio.to_thread(CliRunner().invoke, application(), [*command, "--drop", "--reason", "test", "--yes"])
    assert said.exit_code == 0, said.stdout
    assert all(each["left"] == 0 for each in json.loads(said.stdout)["replicas"])
    found = dict(await inbox(roles, await wait_in_sync(roles, *NAMES)))
    known = {seq: msg_id for msg_id, seq in sender.known.items()}
    left = {seq: msg_id for seq, msg_id in known.items() if seq > CHUNK_ENTRIES}
    again = found.pop(max(found))  # the entry that stood found nothing of what was given up
    assert again == message(10)
    assert {seq: msg_id for seq, msg_id in found.items() if msg_id} == left
    assert len(known) > 2 * CHUNK_ENTRIES
    assert (await stands(roles, epoch)) is False
    audits = [roles.folder / name / "replica" / "audit.log" for name in NAMES]
    assert f"entries 1 to {CHUNK_ENTRIES} of lane 1" in "".join(audit.read_text() for audit in audits if audit.exists())


async def test_a_flipped_byte_is_repaired_from_the_other_replica(roles: Roles) -> None:
    await roles.layout(pi=1)
    settings: dict[str, Any] = {"partition": 0, "flush_interval_s": 0.1, "scrub_keys_per_s": 100_000}
    for name in NAMES:
        roles.start(name, **settings)
    leader = await wait_in_sync(roles, *NAMES)
    sender = Sender(roles, set(NAMES))
    await sender.more(500)
    await sender.stop()
    (other,) = set(NAMES) - {leader}
    roles.send_signal(other, signal.SIGTERM)
    assert await roles.ended(other) == 0
    rot(roles, other)

    roles.start(other, **settings)  # its scrub finds the byte, as soon as it is in sync or before
    assert await roles.ended(other) == 1, roles.log(other)
    roles.start(other, **settings)

    async def set_aside() -> bool:
        return "pi_state_set_aside" in roles.log(other)

    await until(set_aside, "the damaged state is set aside")
    await wait_in_sync(roles, *NAMES)
    roles.send_signal(leader, signal.SIGTERM)
    assert await roles.ended(leader) == 0

    async def other_leads() -> bool:
        return await leader_of(roles, other) == other

    await until(other_leads, "the repaired replica leads")
    found = await inbox(roles, other)
    by_id = {msg_id: seq for seq, msg_id in found}
    assert {msg_id: by_id.get(msg_id) for msg_id in sender.known} == sender.known
    assert [seq for seq, _ in found] == list(range(1, len(found) + 1))


async def test_a_leader_hands_over_at_once_while_requests_keep_coming(roles: Roles) -> None:
    await roles.layout(pi=1)
    for name in NAMES:
        # One that waited for its last request would wait so long: longer than this test does.
        roles.start(name, partition=0, flush_interval_s=0.1, drain_timeout_s=600)
    leader = await wait_in_sync(roles, *NAMES)
    node = await roles.node(leader)
    assert node is not None
    asked = [0] * 20

    async def ask(which: int) -> None:
        client = PiClient(node.address)
        try:
            while True:
                reply = await client.ask(OpenSessions(USER_DEVICE.pack(which + 1, 0)))
                asked[which] += not reply.code
        except Lost:
            return
        finally:
            await client.close()

    asking = [asyncio.create_task(ask(which)) for which in range(len(asked))]
    await until(lambda: min(asked) > 10, "everybody is answered")
    began, before = time.monotonic(), sum(asked)
    roles.send_signal(leader, signal.SIGTERM)
    (other,) = set(NAMES) - {leader}

    async def other_leads() -> bool:
        return await leader_of(roles, other) == other

    await until(other_leads, "the other replica leads")
    print(f"another replica led {time.monotonic() - began:.2f} s after SIGTERM, {sum(asked) - before} requests")
    # One that takes more until for a moment nothing is under way took 800 to 7,000 here, this one up to 70.
    assert sum(asked) - before < 500
    assert await roles.ended(leader) == 0
    await asyncio.gather(*asking)


async def test_an_empty_replica_takes_a_snapshot_when_the_log_no_longer_begins_at_the_beginning(roles: Roles) -> None:
    await roles.layout(pi=1)
    settings: dict[str, Any] = {"partition": 0, "flush_interval_s": 0.1, "segment_mb": 1}
    roles.start("pi-a", **settings)
    leader = await wait_in_sync(roles, "pi-a")
    (node,) = await roles.running(leader)
    client = PiClient(node.address)
    epoch = (await client.ask()).epoch
    sent = 0

    async def trimmed() -> bool:
        nonlocal sent
        for _ in range(10):
            pairs = [(message(number), UIN) for number in range(sent + 1, sent + 1001)]
            reply = await client.ask(appends(epoch, *pairs))
            assert list(reply.results) == list(range(sent + 1, sent + 1001)), reply.code
            sent += 1000
        return int((await health(node))["first"]) > 0

    await until(trimmed, "a log that begins later")
    await client.close()
    roles.start("pi-b", **settings)
    assert await wait_in_sync(roles, "pi-a", "pi-b") == leader
    roles.send_signal(leader, signal.SIGTERM)
    assert await roles.ended(leader) == 0

    async def follower_leads() -> bool:
        return await leader_of(roles, "pi-b") == "pi-b"

    await until(follower_leads, "the new replica leads")
    found = await inbox(roles, "pi-b")
    first = found[0][0]  # at its cap an inbox has lost its oldest entries, in both
    assert found == [(number, message(number)) for number in range(first, sent + 1)]
    assert first == max(1, sent - 100_000 + 1)
