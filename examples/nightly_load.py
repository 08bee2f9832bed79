"""A job that is started again and again, by cron for example, and loads what it has not loaded yet.

pixiu up                                        # in another terminal
python examples/nightly_load.py readings.csv    # loads the lines of a file into the topic "readings"
python examples/nightly_load.py readings.csv    # loads what was added to the file since

The topic keeps for the writer "nightly" up to which line it has come. So a run that is killed in the middle is simply started
again: nothing is stored twice, and nothing is left out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pixiu

TARGET = os.environ.get("PIXIU_TARGET", "zk://127.0.0.1:2181/pubsub")


def load(file: Path, name: str) -> None:
    """Load the lines of a file that are not in the topic yet."""
    lines = file.read_bytes().splitlines()
    with pixiu.connect_sync(TARGET, client="nightly") as px:
        px.topics.create(name, parts=2, if_missing=True)
        with px.durable_topic(name).writer("nightly") as writer:
            begin = writer.progress
            for number, line in enumerate(lines[begin:], begin + 1):
                sensor, _, _ = line.partition(b",")
                writer.send(line, key=sensor, progress=number)
            writer.wait_finished()
            stored = writer.counters.confirmed
    print(f"{len(lines)} lines, began after line {begin}, stored {stored}")


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: nightly_load.py FILE [TOPIC], with a file of lines such as `seven,21.5`")
    load(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "readings")
