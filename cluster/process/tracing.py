"""The tracer of a process, which a role's service passes to its core.

Source: docs/architecture.md, "Probes and traces".
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TypeVar

from cluster.process.context import Context
from cluster.settings.options import RoleOptions
from pixiu.wire.trace import Hop, Tracer

OptionsT = TypeVar("OptionsT", bound=RoleOptions)


def tracer_of(context: Context[OptionsT], hop: Hop, partition: int = 0) -> Tracer:
    """Make a tracer that stamps as this process, and whose counters are among its metrics."""

    def replica() -> int:
        node = context.membership.node
        return node.replica if node is not None else 0

    tracer = Tracer(
        hop, lambda: time.time_ns() // 1000, partition=partition, replica=replica, limit=context.cluster.max_record_bytes
    )
    context.metrics.collect_from(lambda: {f"{name}_total": value for name, value in asdict(tracer.counters).items()})
    return tracer
