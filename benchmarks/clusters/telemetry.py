"""Compare windows of telemetry, published by MQTT and recorded in a durable topic, with a batch over the same file, row for row.

The bodies of a file of telemetry (ts_ms, device, humidity, temp; gzip, CSV) go by MQTT at QoS 1 into rooms, from there into a
durable topic, and through `ingest` into windows of a minute. Some rows are delayed, and some bodies are broken. The windows must
equal those that plain Python adds up from the file: rows, least, most and sum of each value, as decimals; the broken ones must be
counted exactly.

Estimate: 50,000 messages a few thousand a second by MQTT and the topic, so half a minute, and two runs of `ingest` of some
seconds each.

    python -m benchmarks.clusters.telemetry FILE [--rows 0] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pixiu
from tests.support.cluster import running_cluster
from tests.support.telemetry import FIELDS, SELECTED, VALUES, disordered, expected, of_file, record, windows_of, with_broken

SMALL = [f"--{name}=1" for name in ("proxies", "brokers", "broker-replicas", "routers", "router-replicas", "gateways", "relays")]
STORES = ["--xius=1", "--xiu-replicas=1", "--pis=1", "--pi-replicas=1", "--relay-replicas=1", "--topics=1", "--topic-replicas=1"]
BROKEN_EVERY = 100
TOPIC = "telemetry"


def run(file: Path, limit: int) -> dict[str, Any]:
    """Publish, record and ingest; in two halves, so that windows are added to."""
    from pipeline.jobs import ingest
    from pipeline.session import open_session

    readings = disordered(of_file(file))[: limit or None]
    found: dict[str, Any] = {"rows": len(readings)}
    spark = open_session("telemetry", "local[2]")
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder), *SMALL, *STORES, "--admins=1") as cluster:
        cluster.wait_healthy()
        (port,) = cluster.mqtt_ports()

        async def create() -> None:
            async with pixiu.connect(cluster.target) as px:
                await px.topics.create(TOPIC, parts=2)

        asyncio.run(create())
        options = ingest.IngestOptions(cluster.target, f"{folder}/in", "", FIELDS, "ts_ms", ("device",), VALUES, topic=TOPIC)
        broken = late = wanted_broken = 0
        record_s = ingest_s = 0.0
        windows = None
        for half in (readings[: len(readings) // 2], readings[len(readings) // 2 :]):
            bodies = with_broken(half, BROKEN_EVERY)
            wanted_broken += len(bodies) - len(half)
            began = time.perf_counter()
            asyncio.run(record(cluster.target, port, TOPIC, bodies))
            recorded = time.perf_counter()
            report, tables = ingest.run(spark, options)
            windows = tables["windows"]
            record_s, ingest_s = record_s + recorded - began, ingest_s + time.perf_counter() - recorded
            broken, late = broken + report.facts["malformed"], late + report.facts["late"]
        assert windows is not None
        there = windows_of(windows.selectExpr(*SELECTED).collect())
    spark.stop()
    wanted = expected(readings, 60_000)
    found |= {"windows": len(wanted), "equal": there == wanted, "differ": sum(there.get(key) != wanted[key] for key in wanted)}
    found |= {"broken": broken, "broken_sent": wanted_broken, "late": late, "seconds_to_record": round(record_s, 1)}
    found |= {"recorded_a_second": round((len(readings) + wanted_broken) / record_s), "seconds_to_ingest": round(ingest_s, 1)}
    return found


def main() -> int:
    """Run and print. Exit code 1: something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=0, help="The first rows alone; 0: all.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = run(arguments.file, arguments.rows)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name.replace('_', ' ')}: {value}")
    return 0 if found["equal"] and found["broken"] == found["broken_sent"] else 1


if __name__ == "__main__":
    sys.exit(main())
