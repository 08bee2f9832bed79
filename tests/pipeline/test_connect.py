"""Spark Connect: a client without a JVM reads, writes, streams and runs a job, in a server that runs beside the tests' session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import session
from pixiu.errors import ConfigurationError, Unavailable
from tests.pipeline.conftest import Store
from tests.support.effort import CI, in_full

PROJECT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def server(spark: Any) -> Iterator[str]:
    """The URL of a server of Spark Connect in the JVM of the tests' session."""
    for package in session.CONNECT:
        pytest.importorskip(package, reason="pip install 'pixiu-cluster[connect]'")
    service = getattr(getattr(spark._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
    settings = spark.sparkContext._conf._jconf
    settings.set("spark.connect.grpc.binding.port", "0").set("spark.connect.grpc.binding.address", "127.0.0.1")
    service.start(spark._jsc.sc())
    nothing = spark._jvm.scala.Option.empty()
    try:
        yield f"sc://127.0.0.1:{service.localPort()}"
    finally:
        service.stop(nothing, nothing)


def test_a_server_that_is_not_there_and_a_package_that_is_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import SparkSession

    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)  # as in a process that has just begun
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigurationError, match=r"is not installed: pip install 'pixiu-cluster\[spark,connect\]'"):
        session.open_session("tests", "sc://127.0.0.1:1")
    monkeypatch.setattr(session, "CONNECT", ())
    with pytest.raises(Unavailable, match=r"no server of Spark Connect answers at 127\.0\.0\.1:1: Connection refused"):
        session.open_session("tests", "sc://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="is sc://HOST:PORT"):
        session.open_session("tests", "sc://127.0.0.1:x")


@pytest.mark.skipif(CI and not in_full("Spark Connect"), reason="another run's turn: PIXIU_TURN")
def test_a_client_without_a_jvm_does_what_a_session_does(server: str, store: Store, tmp_path: Path) -> None:
    giver, taker = store.users(2)
    bodies = [json.dumps({"ts": f"2026-01-01T00:00:{number:02}Z", "device": "d", "temp": number}) for number in range(30)]
    store.send([giver], [body.encode() for body in [*bodies, "no json"]])
    command = [sys.executable, "-m", "tests.pipeline.connect_client", server, store.target, str(giver), str(taker), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK")}
    environment["PIXIU_KEEP_SESSION"] = "1"
    client = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert client.returncode == 0, client.stderr[-4000:]
    found = json.loads(client.stdout)
    assert found["wrong"].startswith("table messages has no column 'bodies'")
    assert found["copied"] == [*bodies, "no json"]
    counted = {name: found["ingested"][name] for name in ("mails", "malformed", "late", "ahead", "rows_in_windows")}
    assert counted == {"mails": 31, "malformed": 1, "late": 30, "ahead": 0, "rows_in_windows": 30}
