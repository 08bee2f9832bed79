"""Batches of publishers and gateways in flight. Pure.

Source: docs/architecture.md, "A message to a room".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pixiu.wire.record import KEY_AT, SIZE_FIELD, SNOWFLAKE_AT, offsets
from proxy import events as ev


class Batch:
    """A batch in flight.

    Args:
        sessions: SnowflakeID → session of the client that published the message, if it has one; None: none has.
    """

    __slots__ = ("copy", "data", "failures", "first", "last", "more", "pending", "receipt", "sessions", "stream")

    def __init__(
        self,
        stream: int,
        first: int,
        last: int,
        data: bytes,
        copy: int = 0,
        receipt: bool = False,
        more: bool = False,
        *,
        sessions: Mapping[int, int] | None = None,
    ) -> None:
        self.stream, self.first, self.last, self.data = stream, first, last, data
        self.copy, self.receipt, self.more, self.sessions = copy, receipt, more, sessions
        self.pending = 0
        self.failures: list[ev.Failure] = []


def sessions_of(data: bytes, sessions: Sequence[int]) -> Mapping[int, int] | None:
    """SnowflakeID → session of the records of a batch that have one; `sessions` has one number for each record, or is empty."""
    if not any(sessions) or (found := offsets(data, 0, len(data), len(sessions))) is None:
        return None
    numbers = [int.from_bytes(data[at + SNOWFLAKE_AT : at + KEY_AT], "little") for at in found[:-1]]
    return {number: session for number, session in zip(numbers, sessions, strict=True) if session}


def failures_of(batch: Batch, records: Iterable[bytes], code: str, text: str, retry_ms: int = 0) -> list[ev.Failure]:
    """Find the positions of a batch that failed. Rare, so it walks the batch again."""
    lost = {record[SNOWFLAKE_AT:KEY_AT] for record in records}
    positions: list[int] = []
    offset = 0
    for position in range(batch.first, batch.last + 1):
        if batch.data[offset + SNOWFLAKE_AT : offset + KEY_AT] in lost:
            positions.append(position)
        offset += SIZE_FIELD + int.from_bytes(batch.data[offset : offset + SIZE_FIELD], "little")
    failures: list[ev.Failure] = []
    for position in positions:
        if failures and failures[-1].last == position - 1:
            failures[-1] = ev.Failure(failures[-1].first, position, code, text, retry_ms)
        else:
            failures.append(ev.Failure(position, position, code, text, retry_ms))
    return failures
