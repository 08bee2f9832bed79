"""Compare windows of telemetry, published by MQTT and recorded in a durable topic, with a batch over the same file, row for row.

The bodies of a file of telemetry (ts_ms, device, humidity, temp; gzip, CSV) go by MQTT at QoS 1 through a route, which
`pixiu pipeline record` made, into a durable topic, and through `ingest` into windows of a minute. Some rows are delayed, and
between them are broken bodies, rows of now, and rows of a clock that is a month ahead. The windows must equal those that plain
Python adds up: rows, least, most and sum of each value, as decimals. What the topic has, and what is broken, late and ahead, must
be counted exactly.

Estimate: 50,000 messages a few thousand a second by MQTT and the route, so half a minute, and two runs of `ingest` of some seconds
each.

    python -m benchmarks.clusters.telemetry FILE [--rows 0] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.cluster import running_cluster
from tests.support.shared_zookeeper import end_shared_server
from tests.support.telemetry import (
    FIELDS,
    SELECTED,
    VALUES,
    disordered,
    expected,
    of_file,
    publish,
    record,
    windows_of,
    with_broken,
    with_clocks,
)

SMALL = [f"--{name}=1" for name in ("proxies", "brokers", "broker-replicas", "routers", "router-replicas", "gateways", "relays")]
STORES = ["--xius=1", "--xiu-replicas=1", "--pis=1", "--pi-replicas=1", "--relay-replicas=1", "--topics=1", "--topic-replicas=1"]
BROKEN_EVERY, CLOCKS_EVERY = 100, 500
COUNTED = ("messages", "malformed", "late", "ahead")
TOPIC = "telemetry"


def run(file: Path, limit: int) -> dict[str, Any]:
    """Publish, record and ingest; in two halves, so that windows are added to. Each number stands beside the one that is due."""
    from pipeline.jobs import ingest
    from pipeline.session import open_session

    of_the_file = disordered(of_file(file))[: limit or None]
    readings, _, ahead = with_clocks(of_the_file, time.time_ns() // 1_000_000, CLOCKS_EVERY)
    spark = open_session("telemetry", "local[2]")
    due, found = Counter(late=len(of_the_file), ahead=len(ahead)), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        routes = Path(folder) / "routes.toml"
        routes.touch()
        with running_cluster(Path(folder), *SMALL, *STORES, "--admins=1", f"--set=proxy.routes={routes}") as cluster:
            cluster.wait_healthy()
            (port,) = cluster.mqtt_ports()
            record(cluster, "telemetry/#", TOPIC, routes)
            options = ingest.IngestOptions(cluster.target, f"{folder}/in", "", FIELDS, "ts_ms", ("device",), VALUES, topic=TOPIC)
            record_s = ingest_s = 0.0
            for half in (readings[: len(readings) // 2], readings[len(readings) // 2 :]):
                bodies = with_broken(half, BROKEN_EVERY)
                due.update(messages=len(bodies), malformed=len(bodies) - len(half))
                began = time.perf_counter()
                asyncio.run(publish(port, bodies))
                recorded = time.perf_counter()
                report, tables = ingest.run(spark, options)
                record_s, ingest_s = record_s + recorded - began, ingest_s + time.perf_counter() - recorded
                found.update({name: report.facts[name] for name in COUNTED})
            there = windows_of(tables["windows"].selectExpr(*SELECTED).collect())
    spark.stop()
    wanted = expected(readings, 60_000)
    equal = there == wanted and found == due
    return {
        "rows_of_the_file": len(of_the_file),
        **{name: [found[name], due[name]] for name in COUNTED},
        "windows": [len(there), len(wanted)],
        "windows_that_differ": sum(there.get(key) != wanted.get(key) for key in there.keys() | wanted.keys()),
        "equal": equal,
        "recorded_a_second": round(due["messages"] / record_s),
        "seconds_to_ingest": round(ingest_s, 1),
    }


def main() -> int:
    """Run and print. Exit code 1: something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=0, help="The first rows alone; 0: all.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        found = run(arguments.file, arguments.rows)
    finally:
        end_shared_server()
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name.replace('_', ' ')}: {' of '.join(map(str, value)) if isinstance(value, list) else value}")
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
