"""A client of Spark Connect: python -m tests.pipeline.connect_client sc://HOST:PORT TARGET FROM TO FOLDER

It runs a job, copies the mail of a user to another one by a stream, and prints what it found, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from typer.testing import CliRunner

from pipeline.commands import pipeline
from pipeline.folders import is_connect
from pipeline.queries import run_to_end
from pipeline.reading import read, sentence_of
from pipeline.session import SHUFFLE, open_session


def said_of(spark: Any, target: str) -> str:
    """The sentence for a wrong option."""
    try:
        read(spark, target, columns="bodies").count()
    except Exception as error:
        return sentence_of(error)
    return ""


def main(server: str, target: str, giver: str, taker: str, folder: str) -> None:
    """PIXIU_KEEP_SESSION is set: the job uses the session that is open."""
    spark = open_session("tests", server, settings={SHUFFLE: "2"})
    assert is_connect(spark)

    found: dict[str, Any] = {"wrong": said_of(spark, target)}
    form = ["--fields", "ts timestamp, device string, temp double", "--time", "ts", "--keys", "device", "--values", "temp"]
    job = ["ingest", f"{folder}/in", "--target", target, "--users", giver, *form, "--master", server, "--json"]
    result = CliRunner().invoke(pipeline, job)
    assert result.exit_code == 0, result.output
    found["ingested"] = json.loads(result.stdout)
    source = spark.readStream.format("pixiu").option("target", target).option("startingOffsets", "earliest")
    mails = source.option("users", giver).load().selectExpr("xiu_partition", "seq", f"{taker}L as uin", "body")
    copy = mails.writeStream.format("pixiu").option("target", target).option("query", "connect")
    run_to_end(copy.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start)
    copied = read(spark, target, users=taker, columns="seq,body").toPandas()
    found["copied"] = [bytes(body).decode() for body in copied.sort_values("seq").body]
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
