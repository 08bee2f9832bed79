"""Temporary views of a cluster's tables and topics, decoded, for SQL and notebooks.

    register(spark, target, topics=["clicks"])
    spark.sql("select key, count(*) from pixiu_messages where lane = 0 group by key")

A view's end is fixed when it is made: register again to see what came since.

Source: docs/pipeline.md, "Views".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipeline import functions as px
from pipeline import register as register_format
from pipeline.folders import is_connect
from pipeline.spark.options import Given
from pipeline.topics.client import TopicClient
from pixiu.errors import InvalidArgument
from pixiu.wire.export_tables import MESSAGES, TABLES

PREFIX: Final = "pixiu_"
_NO_NAME: Final = re.compile("[^0-9a-z]+")


def register(spark: Any, target: str, *, topics: Sequence[str] = (), names: Any = None, **options: object) -> list[str]:
    """Make a view for each table, `pixiu_messages` and so on, and for each topic, `pixiu_topic_clicks`; returns their names.

    Args:
        target: as the option.
        topics: names of topics.
        names: of users: a DataFrame or a file, as in `pipeline.functions.named`.
        options: further ones of the reads, such as retrySeconds.

    Raises InvalidArgument for topics whose views would have the same name, and for one that does not exist; of a session of Spark
    Connect the first query says the latter.
    """
    register_format(spark)
    found: dict[str, Any] = {}
    for table in TABLES:
        frame = _read(spark, target, {"table": table, **options})
        if table == MESSAGES:
            frame = decoded(frame)
        if names is not None:
            frame = px.named(frame, names, *(column for column in ("key", "sender", "uin") if column in frame.columns))
        found[f"{PREFIX}{table}"] = frame
    for topic in topics:
        name = f"{PREFIX}topic_{_NO_NAME.sub('_', topic.lower()).strip('_')}"
        if name in found:
            raise InvalidArgument(f"topic {topic!r} and another one would both be view {name}: register one of them")
        found[name] = _read(spark, target, {"topic": topic, **options})
        if not is_connect(spark):  # elsewhere the cluster may be out of reach
            with TopicClient(target, topic, topics_retry_s(options)) as client:
                client.describe()
    for name, frame in found.items():
        frame.createOrReplaceTempView(name)
    return list(found)


def decoded(messages: Any) -> Any:
    """Table `messages` with readable columns: `lane`, `application_type`, `topic`, `headers`, `stamps` and `content` instead of
    `type`, `flags`, `ext`, `trace` and `body`."""
    return messages.select(
        "msg_id", "xiu_partition", "seq", "snowflake_id", "key", "sender", "sent_at", "stored_at", "lifetime_min",
        px.lane(), px.application_type(), px.topic_of(), px.headers(), px.stamps(), px.content(),
    )  # fmt: skip


def topics_retry_s(options: Mapping[str, object]) -> float:
    """Time limit for finding who knows a topic, seconds, of the options of a read."""
    return Given(
        {name: str(value) for name, value in options.items() if name.lower() == "retryseconds"}, ("retrySeconds",)
    ).retry_s()


def _read(spark: Any, target: str, options: dict[str, object]) -> Any:
    reader = spark.read.format("pixiu").option("target", target)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()
