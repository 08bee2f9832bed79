"""Topic replicas as processes: what was confirmed is stored once, and delivered until it is acknowledged, whoever leads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from cluster.replication.storage.segment import SUFFIX
from cluster.topics import entries as en
from cluster.wire.v1.repair_pb2 import GiveUpRequest, VerifyRequest
from cluster.wire.v1.repair_pb2_grpc import RepairStub
from pixiu.discovery.node import Node
from pixiu.wire.block import Message, encode
from pixiu.wire.v1 import level_pb2 as pb_level
from pixiu.wire.v1 import topic_pb2 as pb
from tests.support.logins import Logins
from tests.support.roles import Roles, at_least
from tests.support.topics import (
    ORDERS,
    TOPIC,
    WAIT_S,
    Member,
    Stream,
    Writer,
    append,
    blocks_in,
    call,
    in_sync,
    leader,
    make_topic,
    read_all,
)
from tests.support.waiting import until


async def test_blocks_are_written_read_and_consumed(roles: Roles) -> None:
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    await make_topic(node)
    async with Writer(node) as writer:
        assert writer.hello.window_bytes >= 1 << 20
        first = await writer.write([b"one", b"two", b"three"], 1)
        assert (first.verdict, first.position, first.base) == (pb.WRITE_STORED, 3, 0)
        again = await writer.write([b"one", b"two", b"three"], 1)
        assert (again.verdict, again.base) == (pb.WRITE_REPEATED, 0)
        assert (await writer.write([b"five"], 5)).verdict == pb.WRITE_HOLE
        assert (await writer.write([b"four"], 4, level=pb_level.PERSISTED)).verdict == pb.WRITE_STORED
    assert await read_all(node) == {0: b"one", 1: b"two", 2: b"three", 3: b"four"}
    async with Member(node, credit=3) as member:
        assert await member.get(3) == {0: (b"one", 1), 1: (b"two", 1), 2: (b"three", 1)}
        result = await member.report(1, acknowledged=[2, 3])
        assert list(result.acknowledged) == [2, 3]
        assert await member.get(1) == {3: (b"four", 1)}
        result = await member.report(1, acknowledged=[0, 1, 3, 4, 9, 20], refused=[1, 0])
        assert (list(result.acknowledged), list(result.refused)) == ([0, 1, 3, 4], [1])
        assert await member.get(1) == {1: (b"two", 2)}
        await member.report(1, acknowledged=[1, 2])
    state = await call(node, "Channel", pb.ChannelRequest(topic=ORDERS, channel="c", state=True))
    (part,) = state.parts
    assert (part.floor, part.end, part.unacknowledged) == (4, 4, 0)


async def test_a_leader_that_is_killed_loses_nothing_and_nothing_acknowledged_comes_again(roles: Roles) -> None:
    await roles.layout(topic=1)
    names = ["topic-a", "topic-b"]
    for name in names:
        roles.start(name, partition=0)
    await roles.running(*names)
    first = await in_sync(roles, 2, *names)
    (node,) = await roles.running(first)
    await make_topic(node)
    async with Writer(node) as writer:
        for number in range(1, 200, 2):
            assert (await writer.write([b"%d" % number, b"%d" % (number + 1)], number)).verdict == pb.WRITE_STORED
        async with Member(node, credit=150) as member:
            got = await member.get(150)
            done = sorted(got)[::3]
            pairs = [bound for offset in done for bound in (offset, offset + 1)]
            result = await member.report(1, acknowledged=pairs)
            assert len(result.acknowledged) == len(pairs)
            writer.send([b"unconfirmed"], 201)
            await roles.kill(first)
    (other,) = [name for name in names if name != first]
    assert await leader(roles, other) == other
    (node,) = await roles.running(other)
    async with Writer(node) as writer:
        last = await writer.write([b"unconfirmed"], 201)
        assert last.verdict in (pb.WRITE_STORED, pb.WRITE_REPEATED)
        assert last.base == 200
    expected = {number - 1: b"%d" % number for number in range(1, 201)} | {200: b"unconfirmed"}
    assert await read_all(node) == expected
    async with Member(node, credit=1000) as member:
        left = await member.get(201 - len(done))
        assert {offset: body for offset, (body, _) in left.items()} == {
            offset: body for offset, body in expected.items() if offset not in done
        }
    roles.start(first, partition=0)
    await in_sync(roles, 2, *names)


async def test_a_new_follower_gets_a_snapshot_and_can_lead(roles: Roles) -> None:
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0, segment_mb=1, flush_interval_s=0.05)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    await make_topic(node)
    body = b"x" * 100_000
    async with Writer(node) as writer:
        for number in range(1, 60):
            assert (await writer.write([body], number)).verdict == pb.WRITE_STORED
        async with Member(node, credit=10) as member:
            await member.get(10)
            await member.report(1, acknowledged=[0, 5])
        # Without the beginning of the log a follower needs a snapshot.
        await until(lambda: not [*roles.folder.glob(f"topic-a/**/{0:020d}-*{SUFFIX}")], "the end of the log's first segment")
        roles.start("topic-b", partition=0, segment_mb=1)
        await in_sync(roles, 2, "topic-a", "topic-b")
        assert (await writer.write([b"last"], 60)).base == 59
    await roles.kill("topic-a")
    await leader(roles, "topic-b")
    (node,) = await roles.running("topic-b")
    assert await roles.metric(node, "replica_snapshots_installed_total") == 1
    assert await read_all(node) == dict.fromkeys(range(59), body) | {59: b"last"}
    async with Member(node, credit=100) as member:
        assert sorted(await member.get(55)) == list(range(5, 60))
    roles.start("topic-a", partition=0)
    await in_sync(roles, 2, "topic-a", "topic-b")


async def test_what_a_disk_lost_is_taken_from_another_replica(roles: Roles) -> None:
    await roles.layout(topic=1)
    names = ["topic-a", "topic-b"]
    for name in names:
        roles.start(name, partition=0, flush_interval_s=0.05)
    await roles.running(*names)
    first = await in_sync(roles, 2, *names)
    (other,) = [name for name in names if name != first]
    (node,) = await roles.running(first)
    await make_topic(node)
    async with Writer(node) as writer:
        for number in range(1, 41):
            await writer.write([b"%d" % number * 1000], number)
    await roles.end(other)
    (segment,) = (roles.folder / other / "state/parts").rglob("*.seg")
    segment.write_bytes(segment.read_bytes()[:-30_000])
    roles.start(other, partition=0)
    (mended,) = await roles.running(other)
    await until(lambda: at_least(roles.metric(mended, "gaps_mended_total"), 1), "a mended gap")
    await in_sync(roles, 2, *names)
    await roles.kill(first)
    await leader(roles, other)
    (node,) = await roles.running(other)
    assert await read_all(node) == {number - 1: b"%d" % number * 1000 for number in range(1, 41)}
    roles.start(first, partition=0)
    await in_sync(roles, 2, *names)


async def test_reads_wait_and_members_learn_of_the_end_of_a_part(roles: Roles) -> None:
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    await make_topic(node, parts=[1, 2])
    empty = await call(node, "Read", pb.TopicReadRequest(topic=ORDERS, part=1, end=True))
    # From an offset, because the write may come first.
    request = pb.TopicReadRequest(topic=ORDERS, part=1, offset=empty.next, wait_ms=30_000)
    waiting = asyncio.create_task(call(node, "Read", request))
    async with Writer(node) as writer, Member(node, credit=1) as member:
        await writer.write([b"one", b"two"], 1)
        reply = await waiting
        assert [(base, block.count) for base, block in blocks_in(reply.blocks)] == [(0, 2)]
        late = await call(node, "Read", pb.TopicReadRequest(topic=ORDERS, part=1, time_us=1 << 60))
        assert (late.blocks, late.next, late.committed_end) == (b"", 2, 2)
        seal = en.encode_seal(en.part_id(TOPIC, 1), [en.Child(3, 0, 32_768, 0)])
        answer = await append(node, en.SEAL, seal)
        assert json.loads(answer.sealed)["writers"] == [[1, 5, 2, 0, 0]]
        refused = await writer.write([b"three"], 3)
        assert (refused.verdict, refused.position, refused.children[0].number) == (pb.WRITE_SEALED, 2, 3)
        assert await member.get(1) == {0: (b"one", 1)}
        dead = await member.report(1, refused=[0, 0])
        assert list(dead.refused) == [0]
        sealed = await call(node, "Read", pb.TopicReadRequest(topic=ORDERS, part=1, offset=2, wait_ms=30_000))
        assert (sealed.sealed, sealed.children[0].number) == (True, 3)
    seek = pb.ChannelRequest(topic=ORDERS, channel="c", parts=[1], seek=pb.SeekChannel(end=True))
    assert (await call(node, "Channel", seek)).changed == 2
    state = await call(node, "Channel", pb.ChannelRequest(topic=ORDERS, channel="c", parts=[1], state=True))
    assert [part.unacknowledged for part in state.parts] == [0]


async def test_a_replica_that_does_not_lead_names_the_leader(roles: Roles) -> None:
    await roles.layout(topic=1)
    names = ["topic-a", "topic-b"]
    for name in names:
        roles.start(name, partition=0)
    await roles.running(*names)
    first = await in_sync(roles, 2, *names)
    (other,) = [name for name in names if name != first]
    node, follower = await roles.running(first, other)
    await make_topic(node)
    async with Writer(follower) as writer:
        refused = await writer.write([b"one"], 1)
        assert (refused.verdict, refused.refusal.code) == (pb.WRITE_REFUSED, "NOT_LEADER")
        assert refused.refusal.leader == node.client_address
    async with Member(follower) as member:
        reply = await member.stream.next()
        assert (reply.end.code, reply.end.leader) == ("NOT_LEADER", node.client_address)
    with pytest.raises(grpc.aio.AioRpcError, match=f"NOT_LEADER.*{node.client_address}"):
        await call(follower, "Read", pb.TopicReadRequest(topic=ORDERS, part=1))
    async with Writer(node) as writer, Member(node, credit=10) as member:
        await writer.write([b"one"], 1)
        await member.get(1)
        ending = asyncio.create_task(roles.end(first))
        draining = False
        while not (reply := await member.stream.next()).end.code:
            draining = draining or reply.draining
        assert (draining or reply.draining, reply.end.code) == (True, "NOT_LEADER")
        await ending
    assert await leader(roles, other) == other
    async with Writer(follower) as writer, Member(follower, credit=10) as member:
        assert (await writer.write([b"two"], 2)).verdict == pb.WRITE_STORED
        assert await member.get(2) == {0: (b"one", 1), 1: (b"two", 1)}
    roles.start(first, partition=0)
    await in_sync(roles, 2, *names)


async def test_an_operator_gives_up_what_no_replica_can_read(roles: Roles) -> None:
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0, flush_interval_s=0.05)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    await make_topic(node)
    async with Writer(node) as writer:
        for number in range(1, 41):
            await writer.write([b"%d" % number * 2000], number)
    await roles.end("topic-a")
    (segment,) = (roles.folder / "topic-a/state/parts").rglob("*.seg")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    roles.start("topic-a", partition=0)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    async with repairs(node) as repair:
        checked = await repair.Verify(VerifyRequest(repair=True), timeout=WAIT_S)
        assert (checked.damaged, checked.left) == (1, 1)
        assert await roles.metric(node, "damaged") == 1
        given_up = await repair.GiveUp(GiveUpRequest(operator="me", reason="a test"), timeout=WAIT_S)
        assert (given_up.values, len(given_up.lost)) == (1, 1)
    found = await call(node, "Read", pb.TopicReadRequest(topic=ORDERS, part=1, offset=0))
    low, high = found.gap_low, found.gap_high
    assert 0 < low < high == low + 1 < 40
    assert [base for base, _ in blocks_in(found.blocks)] == list(range(low))
    async with Member(node, credit=100) as member:
        got = await member.get(40 - (high - low))
        assert sorted(got) == [*range(low), *range(high, 40)]
        state = await call(node, "Channel", pb.ChannelRequest(topic=ORDERS, channel="c", state=True))
        assert [part.lost for part in state.parts] == [high - low]
    assert await roles.metric(node, "damaged") == 0


@contextlib.asynccontextmanager
async def repairs(node: Node) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(node.address) as channel:
        yield RepairStub(channel)


RULES = """
[[rule]]
allow = ["produce"]
users = ["writer"]
topics = ["orders"]

[[rule]]
allow = ["consume"]
users = ["reader"]
topics = ["orders"]
"""


async def refusal_without_login(node: Node) -> grpc.StatusCode:
    """The status of a stream that names no login. gRPC says INTERNAL where it was about to send when the stream ended."""
    while True:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with Writer(node):
                pass
        if refused.value.code() is not grpc.StatusCode.INTERNAL:
            return refused.value.code()


async def test_rules_hold_and_the_sender_is_the_login(roles: Roles) -> None:
    logins = Logins(roles.folder)
    logins.write_rules(RULES)
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0, access_file=logins.file, cluster_key_dir=logins.keys)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    await make_topic(node)
    assert await refusal_without_login(node) is grpc.StatusCode.UNAUTHENTICATED
    may_write, may_read = logins.token("writer", 7), logins.token("reader", 8)
    async with Writer(node, token=may_read) as writer:
        assert (await writer.write([b"one"], 1)).refusal.code == "NOT_ALLOWED"
    async with Writer(node, token=may_write) as writer:
        assert (await writer.write([b"one"], 1)).verdict == pb.WRITE_STORED
    async with Member(node, token=may_write) as member:
        assert (await member.stream.next()).end.code == "NOT_ALLOWED"
    async with Member(node, token=may_read) as member:
        (delivery,) = (await member.stream.next()).deliveries
        assert (delivery.sender, delivery.data) == (7, b"one")
        logins.write_rules(RULES.replace("reader", "another"))
        while not (reply := await member.stream.next()).end.code:
            pass
        assert reply.end.code == "NOT_ALLOWED"


async def test_a_member_that_reports_nothing_gets_its_credit_and_others_the_rest(roles: Roles) -> None:
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    await make_topic(node)
    async with Writer(node) as writer, Member(node, credit=5) as slow:
        await writer.write([b"x" * 1000] * 600, 1)
        assert sorted(await slow.get(5)) == [0, 1, 2, 3, 4]
        async with Member(node, credit=1000) as quick:
            assert sorted(await quick.get(595)) == list(range(5, 600))
            await quick.report(1, acknowledged=[5, 600])
            state = await call(node, "Channel", pb.ChannelRequest(topic=ORDERS, channel="c", state=True))
            (part,) = state.parts
            assert (part.floor, part.unacknowledged, part.with_members) == (0, 5, 5)
            assert sorted((each.credit, each.having) for each in part.members) == [(5, 5), (1000, 0)]
            await slow.stream.__aexit__(None, None, None)
            assert await quick.get(5) == dict.fromkeys(range(5), (b"x" * 1000, 2))


async def test_what_is_malformed_is_refused_and_counted(roles: Roles) -> None:
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    await make_topic(node)
    good = encode([Message(b"x", 0)], topic=TOPIC, part=1, writer=5, first=1)
    async with Writer(node) as writer:
        for number, bad in enumerate((b"", b"PB", good[:-1], good[:-1] + b"y", bytes(1 << 20), bytes((1 << 20) + 1))):
            writer.stream.send(pb.TopicWriteRequest(request=number, block=bad))
            result = await writer.result()
            assert (result.request, result.verdict) == (number, pb.WRITE_REFUSED)
            assert result.refusal.code in ("MALFORMED", "INVALID_ARGUMENT", "RECORD_TOO_LARGE"), result
        assert (await writer.write([b"x"], 1)).verdict == pb.WRITE_STORED
    async with Stream(node, "Write") as stream:
        stream.send(pb.TopicWriteRequest(block=good))
        assert (await stream.next()).end.code == "INVALID_ARGUMENT"
    async with Stream(node, "Consume") as stream:
        stream.send(pb.ConsumeRequest(credit=5))
        assert (await stream.next()).end.code == "INVALID_ARGUMENT"
    async with Member(node, channel="nothing") as member:
        assert "no channel nothing" in (await member.stream.next()).end.text
    async with Member(node) as member:
        await member.get(1)
        assert (await member.report(1, acknowledged=[0])).refusal.code == "INVALID_ARGUMENT"
        assert list((await member.report(9, acknowledged=[0, 1 << 60])).acknowledged) == []
        assert list((await member.report(1, acknowledged=[0, 1 << 60])).acknowledged) == [0, 1]
    for wrong in (pb.TopicReadRequest(topic="nothing", part=1), pb.TopicReadRequest(topic=ORDERS, part=9)):
        with pytest.raises(grpc.aio.AioRpcError, match=r"NOT_SERVED|WRONG_PARTITION"):
            await call(node, "Read", wrong)
    assert (await append(node, en.BLOCK, good)).refusal.code == "NOT_SERVED"
    assert (await append(node, en.OPEN, b"{")).refusal.code == "MALFORMED"
    assert await roles.metric(node, "refused_before_core_total") >= 3
    assert await roles.metric(node, "malformed_total") == 3


async def test_retention_drops_segments_and_says_so(roles: Roles) -> None:
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0, flush_interval_s=0.05, retention_interval_s=0.1)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    await make_topic(node, retention_bytes=18 << 20)
    async with Writer(node) as writer:
        for number in range(1, 51):
            assert (await writer.write([b"x" * 1_000_000], number)).verdict == pb.WRITE_STORED
    first = 0

    async def trimmed() -> bool:
        nonlocal first
        first = (await call(node, "Read", pb.TopicReadRequest(topic=ORDERS, part=1, offset=50))).first
        return bool(first > 20)

    await until(trimmed, "two dropped segments")
    found = await call(node, "Read", pb.TopicReadRequest(topic=ORDERS, part=1, offset=0))
    assert (found.gap_low, found.gap_high, found.next, found.blocks) == (0, first, first, b"")
    folder = roles.folder / "topic-a/state/parts"
    await until(lambda: _are(sum(path.stat().st_size for path in folder.rglob("*.seg")) < 40 << 20), "files that are gone")
    state = await call(node, "Channel", pb.ChannelRequest(topic=ORDERS, channel="c", state=True))
    assert [(part.floor, part.lost) for part in state.parts] == [(first, first)]
    assert (await append(node, en.TOPIC, en.TopicSettings(TOPIC, ORDERS, deleted=True).encode())).ok
    assert (await append(node, en.DROP, en.encode_drop(en.part_id(TOPIC, 1)))).ok
    await until(lambda: _are(not list(folder.iterdir())), "a folder that is gone")


async def test_a_compacted_topic_keeps_the_last_message_of_each_key(roles: Roles) -> None:
    await roles.layout(topic=1)
    options: dict[str, Any] = {"partition": 0, "flush_interval_s": 0.05, "retention_interval_s": 0.1}
    roles.start("topic-a", **options)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    await make_topic(node, compact=3600)
    last = 0
    async with Writer(node) as writer:

        async def compacted() -> bool:
            nonlocal last
            last += 1
            assert (await writer.write([b"%d" % last + bytes(500_000)], last, key=b"a")).verdict == pb.WRITE_STORED
            return await roles.metric(node, "compacted_bytes_total") > 1_000_000

        await until(compacted, "files without superseded messages")
    found = await read_all(node)
    assert len(found) < last
    assert found[last - 1].startswith(b"%d\0" % last)
    async with Member(node) as member:
        got = list[int]()
        while last - 1 not in got:
            got += await member.get(1)
        assert {*got} <= {*found}, "compaction may have gone on meanwhile"
    await roles.kill("topic-a")
    roles.start("topic-a", **options)
    (node,) = await roles.running("topic-a")
    await leader(roles, "topic-a")
    reply = await call(node, "Last", pb.TopicLastRequest(topic=ORDERS, part=1, key=b"a"))
    assert (reply.known, reply.message.base) == (True, last - 1)
    assert (await read_all(node)).keys() <= found.keys()


async def _are(found: bool) -> bool:
    return found
