"""Pixiu for Spark: `format("pixiu")` as a source and a sink, and the jobs that operators run on it (docs/pipeline.md).

    from pipeline import register

    register(spark)
    spark.read.format("pixiu").option("target", "zk://127.0.0.1:2181/pubsub").load().groupBy("key").count().show()

Needs `pip install 'pixiu-cluster[spark]'` and Java 17 or newer.
"""

from __future__ import annotations

from typing import Any


def register(spark: Any) -> None:
    """Make `format("pixiu")` known to a SparkSession."""
    from pipeline.format import PixiuSource  # it needs PySpark, which importing this package does not

    spark.dataSource.register(PixiuSource)


__all__ = ["register"]
