"""What jobs say when Spark fails, what sessions begin with, and how a task waits for its turn. No Java."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from pipeline.reading import problem_of, sentence_of
from pipeline.spark import registry
from pipeline.spark import replicas as module
from pipeline.spark.replicas import QUEUE_S, Replicas, Rows
from pipeline.topics.client import TopicClient
from pixiu.discovery.view import View
from pixiu.errors import DiskFull, NotServed, Overloaded, PixiuError, RegistryUnavailable, Unavailable, Unreachable
from pixiu.wire.export_tables import MESSAGES, columns_of
from pixiu.wire.v1 import export_pb2

ROWS = Rows(0, MESSAGES, columns_of(MESSAGES, ("seq",)), (), 1, 9)
IN_A_BATCH = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Reason: An exception was raised by the Python \
Proxy. Return Message: Traceback (most recent call last):
  File "/x/py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
                   ^^^^^^^^^^^^^^^^
"""
FULL = """py4j.protocol.Py4JJavaError: An error occurred while calling o114.parquet.
: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows to file:/archive/batch=0. SQLSTATE: 58030
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.taskFailedWhileWritingRowsError(QueryExecutionErrors.scala:823)
Caused by: java.io.IOException: No space left on device
"""
IN_A_WORKER = """
An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/x.py", line 23, in <lambda>
    ~^^~
ZeroDivisionError: integer division or modulo by zero
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (IN_A_WORKER, "ZeroDivisionError: integer division or modulo by zero"),
        (IN_A_BATCH + "ValueError: a plain one\nwith two lines\n SQLSTATE: 39000", "ValueError: a plain one"),
        (
            IN_A_BATCH + FULL.replace("No space left on device", "it"),
            "org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows to "
            "file:/archive/batch=0. SQLSTATE: 58030",
        ),
        (IN_A_BATCH + "pixiu.errors.Gone: Xiu partition 0: rows are lost\n SQLSTATE", "Xiu partition 0: rows are lost"),
        ("An error occurred while calling o1.x.\n: java.lang.Y: z\n\tat a", "java.lang.Y: z"),
        ("", "RuntimeError"),
    ],
)
def test_one_sentence_of_whatever_spark_raises(text: str, said: str) -> None:
    assert sentence_of(RuntimeError(text)) == said
    assert problem_of(RuntimeError(text)).code == Unavailable.code


@pytest.mark.parametrize("begin", ["", IN_A_BATCH])
def test_a_full_disk_is_said(begin: str) -> None:
    problem = problem_of(RuntimeError(begin + FULL))
    assert isinstance(problem, DiskFull)
    assert str(problem) == (
        "no space is left on the disk of file:/archive/batch=0: free some, and run it again; it continues where it was"
    )


class Refused(grpc.RpcError):
    """As a replica that has as many readers as it serves."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return "OVERLOADED: 16 readers export from this replica already"


class Turns:
    """Two replicas, the second of which has a turn for this task after some seconds of a clock that only pauses move."""

    def __init__(self, free_at: float) -> None:
        self.free_at, self.now = free_at, 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def stub(self, address: str) -> Any:
        turns = self

        class Call:
            def __iter__(self) -> Iterator[export_pb2.RowsOfReply]:
                if address == "b" and turns.now >= turns.free_at:
                    yield export_pb2.RowsOfReply(next=9)
                    return
                raise Refused

            def cancel(self) -> None:
                pass

        class Stub:
            def Rows(self, request: object, timeout: float) -> Call:
                return Call()

        return Stub()


def read(monkeypatch: pytest.MonkeyPatch, turns: Turns) -> float:
    monkeypatch.setattr(module, "time", turns)
    found = Replicas("127.0.0.1:1", "xiu", {0: ("a", "b")}, retry_s=60)
    monkeypatch.setattr(found, "_stub", turns.stub)
    monkeypatch.setattr(found, "find", lambda: 1)
    assert list(found.read(ROWS)) == []
    return turns.now


def test_a_target_without_a_cluster_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No port, no host, no root: nothing of it gets better by waiting."""
    began = time.monotonic()
    for target, said in (
        ("zk://127.0.0.1:1/pubsub", "no ZooKeeper listens at 127.0.0.1:1; start a cluster with `pixiu up`"),
        ("zk://nobody.invalid:2181/pubsub", r"no ZooKeeper listens at nobody.invalid:2181 .no host is named nobody.invalid"),
    ):
        with pytest.raises(RegistryUnavailable, match=said):
            Replicas(target, "xiu").find()
        with pytest.raises(RegistryUnavailable, match=said):
            TopicClient(target, "clicks").describe()
    with pytest.raises(Unreachable, match=r"no proxy listens at 127.0.0.1:1"):
        TopicClient("127.0.0.1:1", "clicks").describe()
    root = "zk://127.0.0.1:1/nope"
    empty: Future[SimpleNamespace] = Future()
    empty.set_result(SimpleNamespace(view=View()))
    monkeypatch.setitem(registry._SESSIONS, (os.getpid(), root), cast(registry._Session, SimpleNamespace(ready=empty)))
    with pytest.raises(NotServed, match=f"no cluster is registered at {root}: check its root"):
        Replicas(root, "xiu", known={}).find()
    with pytest.raises(NotServed, match=f"no cluster is registered at {root}: check its root"):
        TopicClient(root, "clicks", is_task=True).describe()
    with pytest.raises(Unavailable, match=r"not served for 0.2 s .127.0.0.1:1: connection refused"):
        TopicClient("127.0.0.1:1", "clicks", 0.2, is_task=True).describe()  # a proxy that restarts
    assert time.monotonic() - began < 10, "less than one connection may take"


def test_a_hold_is_an_error_where_no_replica_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else retention could trim what a reader needs, and nobody would know."""
    taking: set[str] = set()

    class Stub:
        def __init__(self, address: str) -> None:
            self.address = address

        def Hold(self, request: export_pb2.HoldRequest, timeout: float) -> None:
            if self.address not in taking:
                raise Refused

    found = Replicas("127.0.0.1:1", "xiu", {0: ("a", "b")})
    monkeypatch.setattr(found, "_stub", Stub)
    with pytest.raises(Overloaded):
        found.hold(0, "b", 7)
    taking.add("b")
    found.hold(0, "b", 7)


def test_a_task_waits_for_its_turn_longer_than_it_looks_for_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 900 <= read(monkeypatch, Turns(900.0)) < 910
    with pytest.raises(PixiuError, match="16 readers export from this replica already") as refused:
        read(monkeypatch, turns := Turns(10 * QUEUE_S))
    assert refused.value.code == Overloaded.code
    assert QUEUE_S - 5 < turns.now <= QUEUE_S
