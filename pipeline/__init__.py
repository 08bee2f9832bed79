"""Pixiu for Spark: `format("pixiu")` as a source and a sink, and the jobs that operators run on it (docs/pipeline.md).

    from pipeline import register

    register(spark)
    spark.read.format("pixiu").option("target", "zk://127.0.0.1:2181/pubsub").load().groupBy("key").count().show()

Needs `pip install 'pixiu-cluster[spark]'` and Java 17 or newer.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from pipeline.folders import is_connect


def register(spark: Any) -> None:
    """Make `format("pixiu")` known to a SparkSession, one of Spark Connect included; nothing else of the session changes.

    On this machine the source runs in this Python, which has its packages, unless PYSPARK_PYTHON names another one: Spark would
    take the first python3 on the PATH. Elsewhere set PYSPARK_PYTHON to a Python of the executors that has `pixiu-cluster[spark]`.
    """
    from pipeline.format import PixiuSource  # it needs PySpark, which importing this package does not

    context = None if is_connect(spark) else spark.sparkContext
    if context is None or not context.master.startswith("local") or os.environ.get("PYSPARK_PYTHON"):
        spark.dataSource.register(PixiuSource)
        return
    theirs, context.pythonExec = context.pythonExec, sys.executable  # registering notes it for this source alone
    try:
        spark.dataSource.register(PixiuSource)
    finally:
        context.pythonExec = theirs


__all__ = ["register"]
