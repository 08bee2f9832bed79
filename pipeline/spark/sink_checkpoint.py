"""The cluster to which a query writes, in a file of the query's checkpoint: `CHECKPOINT/pixiu_cluster`, 16 hex digits.

Spark stores nothing about a sink in a checkpoint. The driver reads the file when it plans a micro-batch and writes it when the
first one is committed; tasks, which are connected, compare.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from pipeline.folders import arrow_system
from pixiu.errors import InvalidArgument

NAME: Final = "pixiu_cluster"
MAX_BYTES: Final = 64
LOG: Final = logging.getLogger("pixiu.pipeline")


def read_cluster(checkpoint: str) -> str:
    """Read the cluster of a checkpoint; empty: there is none, or Arrow cannot read it. Raises InvalidArgument for a malformed
    file."""
    try:
        system, root = arrow_system(checkpoint)
        with system.open_input_stream(f"{root}/{NAME}") as stream:
            found = str(stream.read(MAX_BYTES), errors="replace").strip()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, ImportError) as error:  # Arrow's are of these types
        LOG.warning("the checkpoint in %s is not compared with the cluster: %s", checkpoint, str(error).split("\n", 1)[0])
        return ""
    if re.fullmatch("[0-9a-f]{16}", found) is None:
        raise InvalidArgument(
            f"{checkpoint}/{NAME} does not hold the ID of a cluster: remove it, or use another checkpointLocation"
        )
    return found


def write_cluster(checkpoint: str, cluster: str) -> None:
    """Write the cluster, if there is none yet; whole or not at all."""
    try:
        system, root = arrow_system(checkpoint)
        with system.open_output_stream(f"{root}/{NAME}.new") as stream:
            stream.write(f"{cluster}\n".encode())
        system.move(f"{root}/{NAME}.new", f"{root}/{NAME}")
    except (OSError, ValueError, ImportError) as error:
        LOG.warning("the cluster is not noted in %s: %s", checkpoint, str(error).split("\n", 1)[0])
