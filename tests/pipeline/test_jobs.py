"""Jobs: what they find is what the test's own ledger says."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

import pixiu
from pipeline import commands
from pipeline.commands import _quiet_java, pipeline, run_job
from pipeline.jobs.audit import AuditOptions
from pipeline.jobs.skew import Load, SkewOptions, partitions_of, verdict
from pipeline.queries import run_to_end
from pipeline.report import Bars, Report, Section, Series, text_of
from pipeline.spark.replicas import Replicas, Rows
from pixiu.client.stores.leaders import Stores
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.ids import msg_id, snowflake
from pixiu.wire.export_tables import columns_of
from pixiu.wire.inbox_operations import encode_acknowledges, encode_add_device, encode_appends, encode_opens
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import pi_pb2, xiu_pb2
from tests.pipeline.conftest import Store
from tests.support.cluster import is_healthy, wait_for
from tests.support.framed import store_call
from tests.support.waiting import until
from tools.cli.status import read_status
from tools.load.mqtt import MQTTClient

DATA = Path(__file__).resolve().parents[2] / "tools" / "replay" / "data"


def test_verdicts() -> None:
    def loads(*most: int) -> list[Load]:
        return [Load(2 << place, each, 1000 / (2 << place)) for place, each in enumerate(most)]

    assert verdict(loads(550, 300, 160), 20) == "leave"
    assert verdict(loads(900, 450, 230), 200) == "double", "many keys of one half: they spread"
    assert verdict(loads(900, 850, 840), 820) == "vroom", "one key is the load"
    assert verdict(loads(760, 700, 650), 100) == "vroom", "doubling gains nothing"
    quarters = [Load(4, 300, 250.0), Load(8, 300, 125.0), Load(16, 175, 62.5)]
    assert verdict(quarters, 140) == "vroom", "even now, and with twice the partitions one key is more than a share"
    assert verdict(quarters, 60) == "leave"


def test_the_layout_knows_how_many_partitions_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replicas, "find", lambda self: 4)
    assert partitions_of(SkewOptions("127.0.0.1:7000")) == 4
    assert partitions_of(SkewOptions("127.0.0.1:7000", partitions=8)) == 8
    assert partitions_of(SkewOptions(log="log.csv")) == 2


@pytest.mark.process
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_query_that_spark_refuses_is_one_sentence_and_nothing_else(
    spark: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIXIU_KEEP_SESSION", "1")
    capfd.readouterr()

    def select(spark: Any) -> Any:
        return spark.range(1).select("tz")

    def sql(spark: Any) -> Any:
        return spark.sql("SELECT tz FROM range(1)")

    for wrong in (select, sql):
        with pytest.raises(Unavailable, match="`tz` cannot be resolved"):
            run_job("test", wrong, master="", as_json=True, out="", html=None)
    assert capfd.readouterr().err == ""


@pytest.mark.process
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_micro_batch_that_comes_twice_is_there_once(spark: Any, tmp_path: Path) -> None:
    """The recipe of the docs for plain Parquet."""
    from tests.pipeline.test_spark_topics import without_commit

    numbers: list[int] = []

    def to_folder(batch: Any, number: int) -> None:
        numbers.append(number)
        batch.write.mode("overwrite").parquet(f"{tmp_path}/out/batch={number}")

    def run() -> None:
        source = spark.readStream.schema("id long").parquet(str(tmp_path / "in"))
        stream = source.writeStream.foreachBatch(to_folder).option("checkpointLocation", str(tmp_path / "checkpoint"))
        run_to_end(stream.trigger(availableNow=True).start)

    for begin in (0, 10):
        spark.range(begin, begin + 10, 1, 1).write.mode("append").parquet(str(tmp_path / "in"))
        run()
    without_commit(tmp_path / "checkpoint")
    run()
    assert numbers == [0, 1, 1]
    found = spark.read.parquet(str(tmp_path / "out"))
    assert sorted(row.id for row in found.collect()) == list(range(20))


@pytest.mark.process
def test_what_a_start_prints_is_no_users_concern_unless_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """The child is what Java is: it inherits file descriptor 2, and prints whatever it likes."""
    child = [sys.executable, "-c", "import sys; print('WARNING: incubator', file=sys.stderr); print('no heap', file=sys.stderr)"]
    with _quiet_java():
        subprocess.run(child, check=True)
        os.write(2, b"more")
    assert capfd.readouterr().err == ""
    with pytest.raises(Unavailable) as raised, _quiet_java():
        subprocess.run(child, check=True)
        raise RuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number.")
    assert str(raised.value) == (
        "Spark did not start: [JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number. (no heap)"
    )
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"
    program = "import sys; from pipeline.commands import _quiet_java\nwith _quiet_java(): print('status', file=sys.stderr)"
    said = subprocess.run([sys.executable, "-c", program], check=True, stderr=subprocess.PIPE, text=True)
    assert said.stderr == "status\n", "what this program says is heard meanwhile"


def test_a_report_is_one_page_that_escapes_what_it_shows() -> None:
    report = Report("A <b>", {"x": "<script>"}, [Section("s", ("a",), (("<i>",),), 1)], [Bars("b", (("<u>", 2.0),), "ms")])
    page = report.to_html()
    assert "<script>" not in page
    assert "<i>" not in page
    assert "<u>" not in page
    assert "http" not in page, "nothing is loaded from elsewhere"
    assert report.to_json()["tables"]["s"] == {"total": 1, "rows": [{"a": "<i>"}]}


def test_a_report_shows_values_as_people_read_them() -> None:
    assert [text_of(18868.0, "messages"), text_of(2.5, "x"), text_of(3)] == ["18,868 messages", "2.50 x", "3"]
    fitting = [text_of(ms, "ms") for ms in (0.004, 0.5, 1.25, 250.0, 3400.0, 180_000.0)]
    assert fitting == ["4 µs", "500 µs", "1.25 ms", "250 ms", "3.4 s", "3 min"]
    assert text_of(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) == "2026-01-02 03:04:05.000Z"
    top = Section("hottest", ("key",), tuple((f"room{place}",) for place in range(20)), 520)
    report = Report("R", {"time_zone": "UTC"}, [top, Section("orphaned", ("a",), (), 0)], [Bars("b", (("u", 2.0),), "messages")])
    report.series.append(Series("Messages stored", 1_767_225_600_000_000, 60_000_000, (1.0, 0.0, 4.0), "messages"))
    page = report.to_html()
    for said in ("hottest: 20 of 520", "Nothing in: orphaned.", "2 messages", "prefers-color-scheme:dark", "time zone<td>UTC"):
        assert said in page
    assert "<h2>orphaned" not in page
    assert page.count("<rect") == 4
    for at in ("2026-01-01T00:00:00Z", "2026-01-01T00:02:00Z: 4 messages", "2026-01-01T00:03:00Z", "most: 4 messages"):
        assert at in page


def test_a_report_names_rows_what_is_empty_and_times_as_fine_as_they_are() -> None:
    report = Report("Archive", {}, [Section("archived", ("messages",), ((3000,),), 1), Section("holes", ("a",), (), 0)])
    shown = Console(file=io.StringIO(), width=200)
    report.show(shown)
    assert isinstance(shown.file, io.StringIO)
    text = shown.file.getvalue()
    assert "archived: 1 row" in text, "that are rows of the table, and not messages"
    assert "Nothing in: holes." in text
    for step_us, labels in (
        (400_000, ("2026-01-01T00:00:00.000Z: 1 messages", "2026-01-01T00:00:00.400Z: 1 messages", "2026-01-01T00:00:00.800Z: 1")),
        (70, ("2026-01-01T00:00:00.000000Z: 1 messages", "2026-01-01T00:00:00.000070Z: 1 messages")),
    ):
        page = Report(
            "R", series=[Series("Messages stored", 1_767_225_600_000_000, step_us, (1.0, 1.0, 1.0), "messages")]
        ).to_html()
        for label in labels:
            assert page.count(f"<title>{label}") == 1


def test_skew_takes_the_target_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mapping[str, object] | None] = []

    def run(_job: str, _run: object, *, about: Mapping[str, object] | None = None, **_options: object) -> None:
        asked.append(about)

    monkeypatch.setattr(commands, "run_job", run)
    monkeypatch.setenv("PIXIU_TARGET", "127.0.0.1:7000")
    for given in ([], ["--log", "log.csv"], ["-t", "127.0.0.1:7002"]):
        assert CliRunner().invoke(pipeline, ["skew", *given]).exit_code == 0
    assert asked == [{"target": "127.0.0.1:7000"}, {"log": "log.csv"}, {"target": "127.0.0.1:7002"}]


def stored_alone(store: Store, uin: int, bodies: list[bytes]) -> list[int]:
    """Store mail as a proxy does that dies before it tells Pi; its MsgIDs."""
    now_ms = time.time_ns() // 1_000_000
    records = [encode(Kind.MAIL, uin, body, snowflake(now_ms, 4001, place)) for place, body in enumerate(bodies)]
    request = xiu_pb2.StoreRequest(batch=b"".join(records), count=len(records), position=1)

    async def stored() -> list[int]:
        for node in (await read_status(store.target)).view.of_role("xiu"):
            found: list[int] = []
            async with asyncio.timeout(60), store_call(node) as call:
                await call.write(request)
                await call.done_writing()
                while (reply := await call.read()) is not None:
                    for result in reply.results:
                        if not result.code:
                            found += [msg_id(reply.partition, 64, result.sequence + place) for place in range(result.count)]
            if len(found) == len(records):
                return found
        raise AssertionError("nobody took it")

    return asyncio.run(stored())


async def listed_alone(store: Store, uin: int, msg_ids: Sequence[int], worker: int) -> None:
    """Append to an inbox as nobody should."""
    async with Stores(store.target) as stores:
        reply = await stores._ask(uin, pi_pb2.PiRequest(request=1, reads=[pi_pb2.PiRead(uin=uin, lane=1, num=1, peek=True)]))
        results = await stores.change(uin, encode_appends(worker, 1, reply.epoch, msg_ids, [uin] * len(msg_ids)))
        assert all(result > 0 for result in results)


def through_mqtt(store: Store, users: Sequence[int], bodies: list[bytes]) -> None:
    """Publish as devices do, by MQTT to a topic, and collect: what comes is written to users as mail, which is kept."""
    came: list[bytes] = []
    topic = f"telemetry/{users[0]}"

    async def publish() -> None:
        (port,) = store.cluster.mqtt_ports()
        collector = MQTTClient("127.0.0.1", port, "collector", on_message=lambda _, payload: came.append(bytes(payload)))
        devices = [MQTTClient("127.0.0.1", port, f"device-{number}") for number in range(3)]
        await asyncio.gather(*(client.connect() for client in (collector, *devices)))
        await collector.subscribe([topic])
        for number, body in enumerate(bodies):
            await devices[number % len(devices)].publish_with_ack(topic, body)
        await until(lambda: len(came) == len(bodies), lambda: f"{len(bodies) - len(came)} are missing")
        await asyncio.gather(*(client.close() for client in (collector, *devices)))

    asyncio.run(publish())
    store.send(users, came)


async def acknowledged(store: Store, uin: int, up_to: int, bits: int) -> None:
    async with Stores(store.target) as stores:
        (device,) = await stores.change(uin, encode_add_device(uin, 77))
        (session,) = await stores.change(uin, encode_opens([(uin, device)]))
        assert await stores.change(uin, encode_acknowledges([(uin, device, session, 1, up_to, bits)])) == [0]


SENDER = """
import asyncio, sys
import pixiu

async def main(target, uin):
    async with pixiu.connect(target, mail_timeout_s=600) as px, px.mail_writer() as writer:
        await writer.space()
        receipts = [writer.send(uin, b"%d" % number) for number in range(5)]
        print(*(int(receipt.id) for receipt in receipts), flush=True)
        await writer.wait_finished()
        print("all are confirmed", flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def process_of(store: Store, role: str, partition: int) -> int:
    """The process ID of a role's only replica."""
    (found,) = [int(each["pid"]) for each in store.cluster.processes(role) if each["partition"] == partition]
    return found


def in_xiu(store: Store, uin: int) -> dict[int, int]:
    """SnowflakeID → MsgID of what is stored for a user."""
    with Replicas(store.target, "xiu") as replicas:
        replicas.find()
        bounds = replicas.bounds(uin % 2)
        columns = columns_of("messages", ["msg_id", "snowflake_id"])
        batches = replicas.read(Rows(uin % 2, "messages", columns, (uin,), bounds.first, bounds.end))
        return {row["snowflake_id"]: row["msg_id"] for batch in batches for row in batch.to_pylist()}


def stored_while_pi_dies(store: Store, uin: int, killed: list[int]) -> dict[int, int]:
    """Mail to a user whose Pi's leader is killed between the two writes, and with it whoever would repeat the second: sender and
    proxy. SnowflakeID → MsgID."""
    pi, proxy = process_of(store, "pi", uin % 2), process_of(store, "proxy", -1)
    sender = None
    os.kill(pi, signal.SIGSTOP)  # what it is asked now waits in its socket, and dies with it
    try:
        sender = subprocess.Popen([sys.executable, "-c", SENDER, store.target, str(uin)], stdout=subprocess.PIPE, text=True)
        assert sender.stdout is not None
        told = [int(word) for word in sender.stdout.readline().split()]
        stored = wait_for(lambda: found if len(found := in_xiu(store, uin)) == len(told) else {}, "mail in Xiu")
    finally:
        for pid in (*([sender.pid] if sender else []), proxy, pi):
            os.kill(pid, signal.SIGKILL)
    rest, _ = sender.communicate(timeout=60)
    assert (len(told), sorted(told), rest) == (5, sorted(stored), ""), "nobody was told that it arrived"
    killed += [pi, proxy]
    return stored


async def listed_and_not_told(store: Store, users: Sequence[int], killed: list[int]) -> dict[int, int]:
    """Mail to users whose devices are there while the relay that is told of it takes nothing, and dies. MsgID → user."""
    (relay,) = [int(each["pid"]) for each in store.cluster.processes("relay")]
    async with pixiu.connect(store.target) as px:
        inboxes = [px.inbox(uin=uin, device="phone") for uin in users]
        await asyncio.gather(*(inbox.ready() for inbox in inboxes))
        os.kill(relay, signal.SIGSTOP)
        try:
            sent = await asyncio.to_thread(store.send, users, [b"%d" % number for number in range(6)])
            assert [inbox.counters.received for inbox in inboxes] == [0] * len(users)
        finally:
            os.kill(relay, signal.SIGKILL)
        await asyncio.gather(*(inbox.close() for inbox in inboxes))
    killed.append(relay)
    return {identity: record.key for identity, record in sent.items()}


def killed_are_back(store: Store, killed: Sequence[int]) -> bool:
    """Whether others serve in their place."""
    return is_healthy(store.target) and not {each["pid"] for each in store.cluster.status()["processes"]} & set(killed)


def saved(store: Store, uin: int) -> int:
    """How far a user's only device has acknowledged lane 1, as Pi knows."""
    with Replicas(store.target, "pi") as replicas:
        replicas.find()
        applied = replicas.bounds(uin % 2).applied
        columns = columns_of("acknowledgements", ["lane", "up_to"])
        batches = replicas.read(Rows(uin % 2, "acknowledgements", columns, (uin,), applied=applied))
        return max((int(row["up_to"]) for batch in batches for row in batch.to_pylist()), default=0)


async def delivered(store: Store, uin: int, count: int, *, acknowledge: bool) -> list[int]:
    """MsgIDs of the first mails that a device is given."""
    found: list[int] = []
    async with pixiu.connect(store.target) as px, px.inbox(uin=uin, device="phone") as inbox, asyncio.timeout(120):
        while len(found) < count:
            mail = await anext(inbox)
            found.append(mail.msg_id)
            if acknowledge:
                mail.acknowledge()
        await inbox.flush()
    return found


@pytest.mark.e2e
@pytest.mark.spark
@pytest.mark.timeout(600)
class TestOnACluster:
    """With Spark."""

    def audit(self, spark: Any, store: Store, **more: Any) -> tuple[Report, dict[str, Any]]:
        from pipeline.jobs import audit

        return audit.run(spark, AuditOptions(store.target, settle_s=0, **more))

    def test_audit_equals_the_ledger(self, spark: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from pipeline.jobs import audit as job
        from pipeline.reading import read

        alone, ghost, late, slow = store.users(4)
        unlucky, missed, away, forgetful = users = store.users(4)
        ordinary = store.send([late, slow], [b"%d" % number for number in range(20)])
        asked: list[dict[str, object]] = []

        def noted(spark: Any, target: str, **options: object) -> Any:
            asked.append(options)
            return read(spark, target, **options)

        monkeypatch.setattr(job, "read", noted)
        clean, _ = self.audit(spark, store)
        assert ["startingTimestamp" in each for each in asked if "table" not in each] == [True], "it reads its window alone"
        assert clean.findings == 0, clean.to_json()

        # What is forged.
        never = stored_alone(store, alone, [b"a", b"b", b"c"])
        ghosts = [msg_id(ghost % 2, 64, 1 << 40 | number) for number in (1, 2)]
        asyncio.run(listed_alone(store, ghost, ghosts, 4002))
        back = stored_alone(store, late, [b"first", b"second"])
        asyncio.run(listed_alone(store, late, back[::-1], 4003))
        asyncio.run(acknowledged(store, slow, 3, 0b100))
        some = sorted(ordinary)[:3]
        got = [{"msg_id": identity, "uin": ordinary[identity].key} for identity in [*some, some[0]]]
        told = [*got[:3], {"msg_id": 5, "uin": alone}]

        # What happens when processes are killed.
        twice = store.send([forgetful], [b"x", b"y", b"z"])
        came = asyncio.run(delivered(store, forgetful, 3, acknowledge=False))
        came += asyncio.run(delivered(store, forgetful, 2, acknowledge=False))
        assert Counter(came) == Counter([*sorted(twice), *sorted(twice)[:2]])
        killed: list[int] = []
        untold = asyncio.run(listed_and_not_told(store, [missed, away], killed))
        cut_off = stored_while_pi_dies(store, unlucky, killed)
        wait_for(lambda: killed_are_back(store, killed), "processes in place of those that were killed")
        assert Counter(asyncio.run(delivered(store, away, 3, acknowledge=True))) == Counter(
            identity for identity, uin in untold.items() if uin == away
        )
        got += [{"msg_id": identity, "uin": forgetful} for identity in came]
        told += [{"msg_id": identity, "uin": uin} for identity, uin in (untold | dict.fromkeys(twice, forgetful)).items()]
        wait_for(lambda: saved(store, away) == 3, "acknowledgements in Pi")

        receipts, sends = tmp_path / "receipts.jsonl", tmp_path / "sends.jsonl"
        receipts.write_text("".join(json.dumps(line) + "\n" for line in got))
        sends.write_text("".join(json.dumps(line) + "\n" for line in told))
        report, found = self.audit(spark, store, unacked_s=0, receipts=str(receipts), sends=str(sends))
        rows = {name: [row.asDict() for row in frame.collect()] for name, frame in found.items()}
        assert {
            (row["msg_id"], row["snowflake_id"], row["key"], row["sender"]) for row in rows["never_listed"] if row["key"] in users
        } == {(identity, snowflake_id, unlucky, 0) for snowflake_id, identity in cut_off.items()}
        assert sorted(row["msg_id"] for row in rows["never_listed"]) == sorted([*never, *cut_off.values()])
        assert {row["msg_id"] for row in rows["orphaned"]} == set(ghosts)
        assert [row["msg_id"] for row in rows["out_of_order"]] == [back[0]]
        assert (rows["stored_twice"], rows["listed_twice"], rows["dropped"]) == ([], [], [])
        assert sorted((row["msg_id"], row["uin"], row["times"]) for row in rows["repeated"]) == sorted(
            [(some[0], ordinary[some[0]].key, 2), *((identity, forgetful, 2) for identity in sorted(twice)[:2])]
        )
        assert [row["msg_id"] for row in rows["lost"]] == [5]
        assert sorted(row["inbox_seq"] for row in rows["unacknowledged"] if row["uin"] == slow) == [4, 5, 7, 8, 9, 10]
        assert sorted((row["uin"], row["msg_id"]) for row in rows["unacknowledged"] if row["uin"] in users) == sorted(
            [*((forgetful, each) for each in twice), *((uin, each) for each, uin in untold.items() if uin == missed)]
        ), "what nobody was told of is not wrong; it is unacknowledged as long as it is"
        assert report.findings == len(never) + len(cut_off) + len(ghosts) + 1 + 3 + 1

    def test_skew_names_the_hot_rooms(self, spark: Any, tmp_path: Path) -> None:
        from pipeline.jobs import skew

        log = tmp_path / "log.jsonl"
        rooms = ["hot"] * 700 + [f"room{number % 100}" for number in range(300)]
        log.write_text("".join(json.dumps({"room": room, "user": f"u{place % 7}"}) + "\n" for place, room in enumerate(rooms)))
        report, tables = skew.run(spark, skew.SkewOptions(log=str(log)))
        first = report.to_json()["tables"]["hottest"]["rows"][0]
        assert (first["key"], first["messages"], first["percent"], first["senders"]) == ("hot", 700, 70.0, 7)
        assert (report.facts["verdict"], report.to_json()["tables"]["hottest"]["total"]) == ("vroom", 101)
        assert {row["name"]: row.messages for row in tables["keys"].collect()} == Counter(rooms)

    def test_latency_finds_the_slow_hop_alone(self, spark: Any, tmp_path: Path) -> None:
        from pipeline.jobs import latency

        def line(number: int, slow_us: int) -> str:
            at, stamps = number * 1000, []
            for role, inside in (("publisher", 10), ("proxy", 100 + slow_us), ("broker", 50), ("gateway", 20)):
                stamps.append({"role": role, "partition": 0, "replica": 1, "in_us": at, "out_us": at + inside})
                at += inside + 500
            return json.dumps({"snowflake_id": number, "kind": "room", "key": 1, "stamps": stamps})

        def hops(slow_us: int) -> dict[str, float]:
            (tmp_path / f"{slow_us}.jsonl").write_text("\n".join(line(number, slow_us) for number in range(100)) + "\nno json\n")
            report, _ = latency.run(spark, latency.LatencyOptions(str(tmp_path / f"{slow_us}.jsonl"), minute=True))
            assert (report.facts["traces"], report.facts["malformed"]) == (100, 1)
            return {row["hop"]: row["p50"] for row in report.to_json()["tables"]["hops"]["rows"]}

        before, after = hops(0), hops(50_000)
        assert before["publisher → proxy"] == 0.5
        moved = {hop: after[hop] - before[hop] for hop in before if after[hop] != before[hop]}
        assert moved == pytest.approx({"proxy 0/1": 50.0, "whole way": 50.0})

    def test_an_archive_holds_what_is_stored_and_says_when_it_does_not(self, spark: Any, store: Store, tmp_path: Path) -> None:
        from pipeline.archive import archive
        from tests.pipeline.test_spark import batch

        store.send(store.users(3), [b"%d" % number for number in range(300)])
        total = batch(spark, store).count()
        options = archive.ArchiveOptions(store.target, str(tmp_path / "archive"), rows_per_batch=total // 2 + 1)
        report, _ = archive.run(spark, options)
        assert (report.facts["messages"], report.facts["batches_written"], report.findings) == (total, 2, 0)
        more = store.send(store.users(1), [b"more"] * 10)
        aside = tmp_path / "aside"
        old = next(Path(options.path).glob("messages/*/*/*.parquet"))
        shutil.move(old, aside)
        report, _ = archive.run(spark, options)
        assert (report.facts["messages"], report.facts["batches_written"]) == (total + 10, 1)
        assert report.findings == 0, "a run reads what it wrote, and not what was there"
        assert archive.verify(spark, options.path).findings > 0
        shutil.move(aside, old)
        found = archive.read_archive(spark, options.path)
        stored = batch(spark, store)
        assert found.select(*stored.columns).exceptAll(stored).count() == 0
        assert stored.exceptAll(found.select(*stored.columns)).count() == 0
        assert found.where("body = 'more'").count() == len(more)

        assert "INT96" not in str([pq.ParquetFile(each).schema for each in Path(options.path).glob("messages/*/*/*.parquet")])
        first, second, third = sorted(int(each.name[6:]) for each in (tmp_path / "archive/manifest").glob("batch=*"))

        whole = tmp_path / "whole"
        shutil.copytree(options.path, whole)
        shutil.rmtree(tmp_path / f"archive/manifest/batch={first}")
        report = archive.verify(spark, options.path)
        assert {row["what"] for row in report.to_json()["tables"]["holes"]["rows"]} == {"missing"}, "whichever batch it is"
        assert report.facts["unfinished"] == 1
        assert report.findings > 0
        assert archive.read_archive(spark, options.path).where(f"batch = {first}").count() == 0, "it is not there"

        torn, *_ = sorted(whole.glob(f"messages/batch={second}/day=*/*.parquet"))
        torn.write_bytes(b"no Parquet")
        (torn.parent / f".{torn.name}.crc").unlink(missing_ok=True)
        shutil.rmtree(whole / f"messages/batch={third}")
        rows = archive.verify(spark, str(whole)).to_json()["tables"]["damaged"]["rows"]
        assert {row["batch"] for row in rows} == {second, third}, "a file that cannot be read ends nothing"
        assert {row["found"] for row in rows if row["batch"] == third} == {0}
        assert archive.verify(spark, str(whole), [first]).findings == 0, "of a batch that is as it was"
        with pytest.raises(Exception, match="holds no archive"):
            archive.verify(spark, str(tmp_path / "nothing"))

    def test_windows_of_a_stream_are_those_of_a_batch(self, spark: Any, store: Store, tmp_path: Path) -> None:
        from pipeline.jobs import ingest

        users = store.users(2)
        options = ingest.IngestOptions(
            store.target, str(tmp_path / "in"), ",".join(map(str, users)), "ts timestamp, device string, temp double", "ts",
            ("device",), ("temp",), rows_per_batch=3000,
        )  # fmt: skip
        lines: list[dict[str, Any]] = []

        def send(begin: int, end: int, by: Callable[[Store, Sequence[int], list[bytes]], object] = Store.send) -> None:
            part = [
                {"ts": f"2026-01-01T00:{number // 10 % 60:02}:{number % 60:02}Z", "device": f"d{number % 3}", "temp": number / 4}
                for number in range(begin, end)
            ]
            lines.extend(part)
            by(store, users, [json.dumps(line).encode() for line in part] + [b"no json"])

        send(0, 300, through_mqtt)
        first, _ = ingest.run(spark, options)
        assert first.facts["rows_in_windows"] == 300
        send(250, 400)  # some of it in windows that are there already
        second, tables = ingest.run(spark, options)
        assert (second.facts["mails"], second.facts["malformed"], second.facts["rows_in_windows"]) == (151, 1, 450)
        wanted: dict[tuple[str, str], list[float]] = {}
        for line in lines:
            wanted.setdefault((line["ts"][:16], line["device"]), []).append(line["temp"])
        found = tables["windows"].selectExpr("date_format(begin, \"yyyy-MM-dd'T'HH:mm\")", "*").drop("begin").collect()
        assert {tuple(row)[:2]: tuple(row)[2:] for row in found} == {
            key: (len(temps), min(temps), max(temps), sum(temps) / len(temps), sum(temps)) for key, temps in wanted.items()
        }
        with pytest.raises(InvalidArgument, match="was made with --window '1 minute', and not '5 minutes': use another PATH"):
            ingest.run(spark, replace(options, window="5 minutes"))

    def test_no_time_is_too_late_and_no_clock_is_anothers(self, spark: Any) -> None:
        from pipeline.jobs import ingest

        options = ingest.IngestOptions("x", "x", "1", "ts timestamp, device string, temp double", "ts", ("device",), ("temp",))

        def batch(*bodies: str) -> Any:
            raw = spark.createDataFrame([(body, stored) for body in bodies], f"body string, {ingest.STORED} timestamp")
            return ingest.parsed(raw, options)

        def line(ts: object, device: str) -> str:
            return json.dumps({"ts": ts, "device": device, "temp": 1})

        at = 1_594_598_424
        stored = datetime.fromtimestamp(at, UTC)
        same = [
            at,
            at * 1000 + 500,
            at * 1_000_000 + 250_000,
            at + 0.5,
            f"{at}.75",
            "2020-07-13T00:00:24Z",
            "2020-07-13T02:00:24.1+02:00",
        ]
        times = batch(*(line(ts, "a") for ts in same)).selectExpr("unix_micros(ts)").collect()
        fractions = [0, 500_000, 250_000, 500_000, 750_000, 0, 100_000]
        assert [row[0] for row in times] == [at * 1_000_000 + each for each in fractions]
        wrong = ["no json", "[]", "{}", line(1e300, "a"), line("9e999", "a"), line("noon", "a"), line(None, "a"), line(10**18, "a")]
        assert batch(*wrong).where("ts is not null").count() == 0
        other = json.dumps({"ts": at, "device": "a", "temp": "warm"})
        assert [(row.ts is None, row.temp) for row in batch(other).collect()] == [(False, None)]
        ahead = batch(line(at + 30 * 86_400, "ahead"))
        late = batch(*[line(at - 86_400, "late")] * 500, *[line(at, "late")])
        parts = ingest.in_windows(ahead, options).unionByName(ingest.in_windows(late, options))
        rows = {(row.device, row.rows) for row in ingest.merged(parts, ("device",)).collect()}
        assert rows == {("ahead", 1), ("late", 500), ("late", 1)}
        counted = [tuple(ingest.counts_of(each, options).first()) for each in (ahead, late, batch(*wrong))]
        assert counted == [(1, 0, 0, 1), (501, 0, 500, 0), (len(wrong), len(wrong), 0, 0)]

    def test_commands(self, spark: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIXIU_KEEP_SESSION", "1")
        runner = CliRunner()
        page = tmp_path / "audit.html"
        result = runner.invoke(
            pipeline,
            ["audit", "-t", store.target, "--json", "--settle", "0", "--html", str(page), "--out", str(tmp_path / "rows")],
        )
        assert result.exit_code in (0, 1), result.output
        said = json.loads(result.stdout)
        assert (said["title"], said["target"], said["time_zone"]) == ("Audit of mail", store.target, "UTC")
        assert {"version", "made_at", "from", "to"} <= said.keys()
        assert "Messages stored" in page.read_text()
        assert page.read_text().startswith("<!doctype html>")
        assert (tmp_path / "rows" / "never_listed" / "_SUCCESS").exists()
        for arguments, said in (
            (["skew", "--log", str(tmp_path / "none.jsonl")], "none.jsonl cannot be read"),
            (["skew"], "looks at a cluster (--target) or at a log"),
            (["latency", str(tmp_path / "nowhere")], "cannot be read"),
            (["audit", "-t", "ftp://x"], "unknown scheme"),
            (["audit", "--html", "/no/such/folder/x.html"], "there is no folder"),
        ):
            result = runner.invoke(pipeline, arguments)
            assert result.exit_code == 2, result.output
            assert said in result.stderr
            assert "Traceback" not in result.output
            assert len(result.stderr.strip().splitlines()) == 1
