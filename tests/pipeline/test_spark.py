"""The source and the sink on a real cluster and a real Spark."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import shutil
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pixiu
from pipeline.queries import BUSY, TRIES, run_to_end, until_not_busy
from pipeline.session import SHUFFLE
from pixiu.errors import InvalidArgument
from pixiu.ids import topic_room, uin_of_name
from pixiu.wire.record import STAMP, Flag
from tests.pipeline.conftest import Store
from tests.support.cluster import wait_for
from tests.support.telemetry import record

PROJECT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.timeout(600)]


def batch(spark: Any, store: Store, **options: object) -> Any:
    reader = spark.read.format("pixiu").option("target", store.target).option("retrySeconds", "30")
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


def stream(spark: Any, store: Store, **options: object) -> Any:
    reader = spark.readStream.format("pixiu").option("target", store.target).option("startingOffsets", "earliest")
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


def to_parquet(source: Any, folder: Path) -> Any:
    writer = source.writeStream.format("parquet").option("path", str(folder / "rows"))
    query = run_to_end(writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start)[-1]
    if query.exception() is not None:
        raise query.exception()
    return query


def of(*users: int) -> str:
    return ",".join(map(str, users))


def test_a_batch_is_what_was_sent(spark: Any, store: Store) -> None:
    users = store.users(20)
    sent = store.send(users, [b"%d" % number * (number % 50) for number in range(3000)], extension=b'{"tag": 1}', type=5)
    rows = batch(spark, store, users=of(*users)).collect()
    assert {row.msg_id for row in rows} == set(sent)
    assert len(rows) == len(sent)
    for row in rows:
        record = sent[row.msg_id]
        assert (row.key, row.snowflake_id, row.sender, row.type) == (record.key, record.snowflake_id, record.sender, record.type)
        assert (bytes(row.body), bytes(row.ext), row.flags) == (record.body, record.extension, record.flags)
        assert row.msg_id == row.xiu_partition << 56 | row.type << 48 | row.seq
        assert 0 <= (row.stored_at - row.sent_at).total_seconds() < 120
    parts = batch(spark, store, users=of(*users), minPartitions=7)
    assert parts.rdd.getNumPartitions() >= 7
    assert {row.msg_id for row in parts.select("msg_id").collect()} == set(sent)
    narrow = batch(spark, store, users=of(users[0]), columns="seq,body", partitions=str(users[0] % 2))
    assert narrow.columns == ["seq", "body"]
    assert narrow.count() == 150


def test_offsets_and_times_cut_a_batch(spark: Any, store: Store) -> None:
    users = store.users(4)
    first = store.send(users, [b"x"] * 40)
    ends = {str(row.xiu_partition): row.end + 1 for row in batch(spark, store).groupBy("xiu_partition").agg({"seq": "max"})
            .withColumnRenamed("max(seq)", "end").collect()}  # fmt: skip
    moment = max(row.stored_at for row in batch(spark, store, columns="stored_at").collect())
    second = store.send(users, [b"y"] * 40)

    def found(**options: object) -> set[int]:
        return {row.msg_id for row in batch(spark, store, users=of(*users), columns="msg_id", **options).collect()}

    assert found(endingOffsets=json.dumps(ends)) == set(first)
    assert found(startingOffsets=json.dumps(ends)) == set(second)
    after_ms = int(moment.timestamp() * 1000) + 1
    assert found(startingTimestamp=after_ms) == set(second)
    assert found(endingTimestamp=after_ms) == set(first)


def test_headers_are_a_column(spark: Any, store: Store) -> None:
    users = store.users(2)
    store.send(users, [b"x"] * 4, extension=b'{"tag": "a", "n": 1}')
    store.send(users, [b"y"] * 4)
    rows = batch(spark, store, users=of(*users), columns="body", includeHeaders="true")
    assert rows.columns == ["body", "headers"]
    found = Counter((bytes(row.body), row.headers and tuple(sorted(row.headers.items()))) for row in rows.collect())
    assert found == {(b"x", (("n", "1"), ("tag", "a"))): 4, (b"y", None): 4}
    reader = spark.read.format("pixiu").option("target", store.target).option("users", of(*users)).option("includeHeaders", "true")
    chosen = reader.schema("seq long, headers map<string,string>").load()
    assert chosen.where("headers['tag'] = 'a'").count() == 4


def test_limits_of_bytes_and_of_tasks(spark: Any, store: Store, tmp_path: Path) -> None:
    store.send(store.users(4), [b"x" * 40_000] * 20)
    starts = json.dumps({str(row.xiu_partition): row.first for row in batch(spark, store, columns="xiu_partition,seq,body")
              .where("length(body) = 40000").groupBy("xiu_partition").agg({"seq": "min"})
              .withColumnRenamed("min(seq)", "first").collect()})  # fmt: skip
    assert batch(spark, store, startingOffsets=starts, maxRecordsPerPartition=4).rdd.getNumPartitions() >= 5
    query = to_parquet(stream(spark, store, startingOffsets=starts, maxBytesPerTrigger=250_000, columns="body"), tmp_path)
    sizes = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    assert sum(sizes) >= 20
    assert max(sizes) <= 6, "of 40,000 bytes"
    behind = [json.loads(progress["sources"][0]["latestOffset"])["bytes_behind"] for progress in query.recentProgress]
    assert behind[0] >= 14 * 40_000
    assert behind[-1] == 0


def test_decoders_and_views(spark: Any, store: Store, tmp_path: Path) -> None:
    from pipeline import functions as px
    from pipeline import views

    users = store.users(3)
    ann = uin_of_name("ann")
    store.send(users[:1], [b"three"], to=users[1:], headers={"tag": "a"}, type=5, lane=0)
    store.send([ann], [b"one"])
    assert views.register(spark, store.target, names=spark.createDataFrame([("ann",), ("nobody",)], "name string"))[:2] == [
        "pixiu_messages",
        "pixiu_inboxes",
    ]
    (first,) = spark.sql(f"select * from pixiu_messages where key = {users[0]}").collect()
    assert (first.lane, first.application_type, first.headers, bytes(first.content)) == (0, 5, {"tag": "a"}, b"three")
    assert (first.topic, first.key_name, first.sender_name) == (None, None, None)
    inboxes = spark.table("pixiu_inboxes")
    together = spark.table("pixiu_messages").join(px.receivers(inboxes), "msg_id").where(f"key = {users[0]}")
    assert together.first().receivers == users
    (second,) = spark.sql("select * from pixiu_messages where key_name = 'ann'").collect()
    assert second.key == ann
    packed = spark.createDataFrame([(gzip.compress(b"packed"), 8), (b"\0\3a/bplain", 16), (b"plain", 0)], "body binary, flags int")
    shown = packed.select(px.content(), px.topic_of()).collect()
    assert [(bytes(row.content), row.topic) for row in shown] == [(b"packed", None), (b"plain", "a/b"), (b"plain", None)]
    trace = STAMP.pack(2, 1, 0, 7, 1_000_000, 3_000_000)
    (stamp,) = spark.createDataFrame([(trace,)], "trace binary").select(px.stamps().alias("stamps")).first().stamps
    assert (stamp.role, stamp.partition, stamp.replica, (stamp.out_at - stamp.in_at).total_seconds()) == ("proxy", 1, 7, 2.0)
    seen = spark.createDataFrame(
        [(5, 5, 0), (6, 5, 0), (7, 5, 2), (69, 5, -(1 << 63)), (70, 5, -1)], "inbox_seq long, up_to long, map long"
    )
    assert [row.done for row in seen.select(px.is_acknowledged().alias("done")).collect()] == [True, False, True, True, False]
    columns = px.lane(), px.application_type(), px.topic_of(), px.headers(), px.stamps(), px.content()
    names = ["lane", "application_type", "topic", "headers", "stamps", "content"]
    assert batch(spark, store).select(*columns).where(px.lane() == 0).columns == names
    assert seen.select(px.is_acknowledged()).columns == ["is_acknowledged"]
    with pytest.raises(InvalidArgument, match="there is no topic nope"):
        views.register(spark, store.target, topics=["nope"])
    topic = px.ids(spark.createDataFrame([("a/b",)], "name string"), "topic").first()
    assert (topic.name, topic.id) == ("a/b", topic_room("a/b"))


def test_a_session_of_ones_own_stays_as_it_is(spark: Any, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import register
    from pipeline.jobs import skew
    from pipeline.session import lent, open_session

    (uin,) = store.users(1)
    store.send([uin], [b"x"] * 5)
    zone, context = "spark.sql.session.timeZone", spark.sparkContext
    spark.conf.set(zone, "Asia/Tokyo")
    try:
        assert (
            open_session("another name", "local[7]", settings={"spark.sql.shuffle.partitions": "99"}).conf.get(zone) == "Asia/Tokyo"
        )
        with lent(spark) as session:
            assert session.conf.get(zone) == "UTC"
            report, _ = skew.run(session, skew.SkewOptions(target=store.target))
        assert report.facts["messages"] >= 5
        assert (spark.conf.get(zone), spark.conf.get(SHUFFLE)) == ("Asia/Tokyo", "2")
        monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
        monkeypatch.setattr(context, "pythonExec", "/no/python3")  # as where another python3 is first on the PATH
        register(spark)
        assert context.pythonExec == "/no/python3"
        assert batch(spark, store, users=of(uin)).count() == 5
    finally:
        spark.conf.set(zone, "UTC")


def test_a_table_of_the_catalog_needs_its_options_at_each_use(spark: Any, store: Store) -> None:
    (uin,) = store.users(1)
    store.send([uin], [b"x"] * 5)
    spark.sql(f"create table mails using pixiu options (target '{store.target}')")
    spark.sql("create table bodies (key bigint, body binary) using pixiu")
    try:
        rows = spark.sql(f"select * from bodies with ('target' = '{store.target}', 'users' = '{uin}')").collect()
        assert [(row.key, bytes(row.body)) for row in rows] == [(uin, b"x")] * 5
        assert spark.sql(f"select * from mails with ('target' = '{store.target}', 'users' = '{uin}')").count() == 5
        with pytest.raises(Exception, match="option target is missing"):
            spark.sql("select * from mails").count()
    finally:
        for table in ("mails", "bodies"):
            spark.sql(f"drop table {table}")


def test_a_name_given_as_a_path_is_refused(spark: Any, store: Store, tmp_path: Path) -> None:
    """Spark passes it on as an option of the source, or of the sink."""
    from pipeline.reading import sentence_of

    rows = spark.range(1).selectExpr("1 as uin", "'x' as body")
    ticks = spark.readStream.format("rate").load().selectExpr("1 as uin", "'x' as body")

    def begin(path: str) -> None:
        writer = ticks.writeStream.format("pixiu").option("target", store.target).option("query", "p")
        run_to_end(partial(writer.option("checkpointLocation", f"{tmp_path}/checkpoint").start, path))

    for step in (
        spark.read.format("pixiu").option("target", store.target).load,
        spark.readStream.format("pixiu").option("target", store.target).load,
        rows.write.format("pixiu").mode("append").option("target", store.target).option("query", "p").save,
        begin,
    ):
        with pytest.raises(Exception, match="was given as a path") as raised:  # whatever Spark wraps it in
            step("clicks")
        assert "'clicks' was given as a path, to load, save or start" in sentence_of(raised.value)


def test_a_topics_table_in_the_catalog_does_not_read_mail(spark: Any, store: Store) -> None:
    clicks = spark.createDataFrame([("buy",)], "body string")
    create_clicks(store)
    clicks.write.format("pixiu").mode("append").option("target", store.target).option("topic", "clicks-1").save()
    options = f"options (target '{store.target}', topic 'clicks-1')"
    spark.sql(f"create table clicks using pixiu {options}")
    spark.sql(f"create table bodies_of_clicks (body binary) using pixiu {options}")
    try:
        for table in ("clicks", "bodies_of_clicks"):
            with pytest.raises(Exception, match="there is no option topic here: in SQL give it at each use"):
                spark.sql(f"select body from {table} with ('target' = '{store.target}')").collect()
            rows = spark.sql(f"select body from {table} with ('target' = '{store.target}', 'topic' = 'clicks-1')").collect()
            assert [bytes(row.body) for row in rows] == [b"buy"]
    finally:
        for table in ("clicks", "bodies_of_clicks"):
            spark.sql(f"drop table {table}")


def create_clicks(store: Store) -> None:
    async def make() -> None:
        async with pixiu.connect(store.target) as px:
            await px.topics.create("clicks-1", if_missing=True)

    asyncio.run(make())


def test_pis_tables(spark: Any, store: Store) -> None:
    users = store.users(6)
    sent = store.send(users, [b"%d" % number for number in range(60)])
    rows = batch(spark, store, table="inboxes", users=of(*users)).collect()
    assert Counter(row.msg_id for row in rows) == Counter(list(sent))
    assert all(sent[row.msg_id].key == row.uin and row.pi_partition == row.uin % 2 for row in rows)
    heads = batch(spark, store, table="heads", users=of(*users)).collect()
    assert {(row.uin, row.last, row.dropped) for row in heads} == {(uin, 10, 0) for uin in users}
    everything = batch(spark, store, table="inboxes").count()
    assert everything >= len(store.sent)


def test_a_stream_takes_no_more_than_its_limit_and_ends_at_the_end(spark: Any, store: Store, tmp_path: Path) -> None:
    users = store.users(3)
    sent = store.send(users, [b"%d" % number for number in range(500)])
    total = batch(spark, store).count()
    limit = total // 3 + 1
    query = to_parquet(stream(spark, store, maxOffsetsPerTrigger=limit), tmp_path)
    sizes = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    assert sizes == [limit, limit, total - 2 * limit]
    (source,) = query.lastProgress["sources"]
    latest = json.loads(source["endOffset"]) | {"rows_behind": 0, "bytes_behind": 0}
    assert json.loads(source["latestOffset"]) == latest, "the lag is in the progress"
    rows = spark.read.parquet(str(tmp_path / "rows"))
    assert (rows.count(), rows.select("msg_id").distinct().count()) == (total, total)
    more = store.send(users, [b"more"] * 30)
    to_parquet(stream(spark, store, maxOffsetsPerTrigger=limit), tmp_path)
    found = [row.msg_id for row in spark.read.parquet(str(tmp_path / "rows")).where(f"key in ({of(*users)})").collect()]
    assert Counter(found) == Counter([*sent, *more])


def test_a_driver_that_dies_neither_loses_nor_repeats(spark: Any, store: Store, tmp_path: Path) -> None:
    """What it leaves: the offsets of a micro-batch that Spark has not committed, and its file, which no list of the sink's has."""
    store.send(store.users(5), [b"%d" % number for number in range(300)])
    total = batch(spark, store).count()
    limited = total // 3 + 1
    to_parquet(stream(spark, store, maxOffsetsPerTrigger=limited), tmp_path)
    for left in ("checkpoint/commits", "rows/_spark_metadata"):
        newest = max((tmp_path / left).glob("[0-9]*"), key=lambda path: int(path.name))
        assert newest.name == "2", "three micro-batches"
        newest.unlink()
        (newest.parent / f".{newest.name}.crc").unlink()
    store.send(store.users(2), [b"meanwhile"] * 50)
    rows = spark.read.parquet(str(tmp_path / "rows"))
    assert rows.count() == 2 * limited
    again = to_parquet(stream(spark, store), tmp_path)
    sizes = [progress["numInputRows"] for progress in again.recentProgress if progress["numInputRows"]]
    assert sizes == [total - 2 * limited, 50], "first the same rows, and nothing that came meanwhile"
    rows = spark.read.parquet(str(tmp_path / "rows"))
    assert (rows.count(), rows.select("msg_id").distinct().count()) == (total + 50, total + 50)


def leader_of(store: Store, partition: int) -> dict[str, Any]:
    """The process that leads a Xiu partition."""

    def look() -> dict[str, Any]:
        for process in store.cluster.processes("xiu"):
            if process["partition"] == partition:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{process['http']}/health", timeout=10) as reply:
                    if json.load(reply)["service"]["replication"]["state"] == "Leading":
                        return dict(process)
        return {}

    return wait_for(look, f"a leader of partition {partition}")


def test_a_sink_that_is_run_again_stores_once(spark: Any, store: Store, tmp_path: Path) -> None:
    (base,) = store.users(1)
    users = store.users(10)
    for number in range(3):
        frame = spark.range(number * 100, number * 100 + 100).selectExpr(
            "id", f"{base} + 1 + id % 10 as uin", "cast(id as string) as body"
        )
        frame.coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))

    def run() -> Any:
        source = (
            spark.readStream.schema("id long, uin long, body string").option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
        )
        query = (
            source.writeStream.format("pixiu")
            .option("target", store.target)
            .option("query", "once")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(240)
        if query.exception() is not None:
            raise query.exception()
        return query

    run()
    commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    assert len(commits) == 3
    commits[-1].unlink()
    (commits[-1].parent / f".{commits[-1].name}.crc").unlink(missing_ok=True)
    again = run()
    assert again.lastProgress["numInputRows"] == 100, "the last micro-batch was written once more"
    stored = batch(spark, store, users=of(*users)).collect()
    assert Counter(bytes(row.body) for row in stored) == Counter(b"%d" % number for number in range(300))
    assert all(row.flags & Flag.DERIVED_ID and row.sent_at is None for row in stored)
    listed = batch(spark, store, table="inboxes", users=of(*users)).collect()
    assert Counter(row.msg_id for row in listed) == Counter(row.msg_id for row in stored)


def test_a_sinks_checkpoint_of_another_cluster_is_refused(spark: Any, store: Store, tmp_path: Path) -> None:
    from pipeline.reading import sentence_of

    (uin,) = store.users(1)
    note = tmp_path / "checkpoint" / "pixiu_cluster"
    (proxy,) = store.cluster.processes("proxy")

    def run(begin: int) -> None:
        frame = spark.range(begin, begin + 10).selectExpr("id", f"{uin}L as uin", "cast(id as string) as body")
        frame.coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))
        query = (
            spark.readStream.schema("id long, uin long, body string").parquet(str(tmp_path / "in"))
            .writeStream.format("pixiu")
            .option("target", proxy["client_address"])
            .option("query", "noted")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )  # fmt: skip
        assert query.awaitTermination(240)
        if query.exception() is not None:
            raise query.exception()

    run(0)
    here = note.read_text()
    assert here.strip() == json.loads(store.cluster.pixiu("layout show", "--json").stdout)["cluster"]
    for wrong, said in (
        (
            "0123456789abcdef",
            f"made with cluster 0123456789abcdef, and {proxy['client_address']} is cluster {here.strip()}: use another",
        ),
        ("x", "pixiu_cluster does not hold the ID of a cluster: remove it, or use another checkpointLocation"),
    ):
        note.write_text(wrong)
        with pytest.raises(Exception) as raised:  # whatever Spark wraps it in
            run(10)
        assert said in sentence_of(raised.value)
        assert "\n" not in sentence_of(raised.value)
        assert batch(spark, store, users=of(uin)).count() == 10, "nothing was written"
        shutil.rmtree(tmp_path / "in")
    note.unlink()
    run(20)
    assert note.read_text() == here, "a checkpoint without a note gets one"
    assert batch(spark, store, users=of(uin)).count() == 20


def test_a_batch_that_is_written_twice_is_stored_once(spark: Any, store: Store) -> None:
    (uin,) = store.users(1)
    frame = spark.range(50).selectExpr("id", f"{uin}L as uin", "cast(id as string) as body", "0 as lane")
    for _ in range(2):
        frame.write.format("pixiu").mode("append").option("target", store.target).option("query", "b").save()
    rows = batch(spark, store, users=of(uin)).collect()
    assert Counter(bytes(row.body) for row in rows) == Counter(b"%d" % number for number in range(50))
    assert {row.type >> 6 for row in rows} == {0}
    changed = frame.selectExpr("id", "uin", "concat(body, '!') as body")
    with pytest.raises(Exception, match="has the ID of another message: two rows have the same values of id"):
        changed.write.format("pixiu").mode("append").option("target", store.target).option("query", "b").save()


def test_the_examples_of_the_docs(spark: Any, store: Store, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (PROJECT / "docs" / "pipeline.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"spark": spark, "target": store.target, "folder": str(tmp_path)}
    for topic in ("clicks", "clicks-of-ann"):
        assert store.cluster.pixiu("topic create", topic).returncode == 0
    for block in blocks:
        for attempt in range(1, TRIES + 1):
            try:
                exec(block, names)
                break
            except Exception as error:  # a query goes on at its checkpoint, and a write of the same name adds nothing twice
                if BUSY not in str(error) or attempt == TRIES:
                    raise
    assert len(blocks) == 9
    spark.sql("drop table clicks_table")
    of_ann = batch(spark, store, topic="clicks").where("key = 'ann'").count()
    assert of_ann == batch(spark, store, topic="clicks-of-ann").count() > 0
    assert names["query"].exception() is None
    assert batch(spark, store, users="1").where("body like 'hello %'").count() == 10
    everybody = {row.uin for row in batch(spark, store, table="heads").select("uin").distinct().collect()}
    told = [row.key for row in batch(spark, store).where("body = 'The servers restart at noon'").select("key").collect()]
    assert sorted(told) == sorted(everybody)


def test_the_tutorial(spark: Any, store: Store, tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "tutorial_spark.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ((pattern, topic),) = re.findall(r"^pixiu pipeline record (\S+) --topic (\S+) --only$", page, re.MULTILINE)
    record(store.cluster, pattern, topic, store.routes)
    names: dict[str, Any] = {}
    for block in blocks:
        text = block.replace("zk://127.0.0.1:2181/pubsub", store.target).replace("/tmp/tutorial", str(tmp_path))
        if "views.register" in block:  # the phone's cursor is on its way
            wait_for(
                lambda: batch(spark, store, table="acknowledgements", users="9001").where("up_to + map <> 0").count(), "a cursor"
            )
        until_not_busy(partial(exec, text, names))
    assert {(row.sensor, row.readings) for row in names["result"].collect()} == {("room/4201", 70), ("room/4202", 70)}
    assert "room/4202" in (tmp_path / "alarms.html").read_text()
    alarms = {row.sensor: (row.alarms, row.acknowledged) for row in names["rows"]}
    assert alarms["room/4201"] == (20, 0)
    assert alarms["room/4202"] == (30, 30)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": "bodies"}, "table messages has no column 'bodies'"),
        ({"startingOffset": "earliest"}, "did you mean startingOffsets?"),
        ({"partitions": "7"}, "option partitions names 7; the cluster has xiu 0 to 1"),
        ({"target": "127.0.0.1:1", "retrySeconds": "1"}, "127.0.0.1:1: connection refused"),
        ({"target": "zk://127.0.0.1:1/pubsub", "retrySeconds": "1"}, "127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_one_sentence(spark: Any, store: Store, options: dict[str, str], said: str) -> None:
    from pipeline.reading import sentence_of

    with pytest.raises(Exception) as raised:  # whatever Spark wraps it in
        batch(spark, store, **options).count()
    sentence = sentence_of(raised.value)
    assert said in sentence
    assert "\n" not in sentence
    assert "Traceback" not in sentence
