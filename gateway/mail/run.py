"""Runs of mail: mails for one lane of a device, under consecutive InboxSeqs. Work done once for each run costs a tenth of the same
work for each mail when ten come together. Pure.

    a relay's batch   envelope record  envelope record  envelope record │ envelope record │ envelope
                      └─ a run: InboxSeqs 5, 6, 7 ─────────────────────┘   another user     a gap

Envelopes and records stay as they came, end to end, so they are passed on in one piece.

Source: docs/delivery.md; docs/decisions/0285-mail-goes-in-runs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pixiu.errors import MalformedData
from pixiu.wire.envelope import ENVELOPE_SIZE, FLAGS_AT, GAP, REDELIVERED, split
from pixiu.wire.record import FLAGS_AT as RECORD_FLAGS_AT
from pixiu.wire.record import INBOX_LANES, MAX_RECORD_BYTES, Flag, has_expired, intact_body


class Place(NamedTuple):
    """Properties that the mails of a run share."""

    uin: int
    device: int
    """Pi's number."""
    session: int
    lane: int
    flags: int
    """Of the envelopes."""


class MailRun:
    """Mails under consecutive InboxSeqs; or one gap marker; or one mail that is damaged."""

    __slots__ = ("bodies", "data", "device", "dropped", "ends", "first", "flags", "lane", "place", "session", "uin")

    def __init__(
        self, place: Place, first: int, data: bytes, ends: Sequence[int], bodies: Sequence[bytes], *, dropped: bool = False
    ) -> None:
        self.place = place
        self.uin, self.device, self.session, self.lane, self.flags = place
        self.first = first
        """InboxSeq of the first one."""
        self.data = data
        """Envelopes with their records, end to end."""
        self.ends = ends
        """End of each mail in `data`."""
        self.bodies = bodies
        """Bodies of the records: none in a gap marker, and none if a record's CRC does not match."""
        self.dropped = dropped
        """True for a marker of what the inbox dropped: nothing below it will come again."""

    @property
    def count(self) -> int:
        """Number of mails; 1 for a marker."""
        return len(self.ends)

    @property
    def last(self) -> int:
        """InboxSeq of the last one."""
        return self.first + len(self.ends) - 1

    @property
    def gap(self) -> bool:
        """True for a gap marker."""
        return bool(self.flags & GAP)

    @property
    def damaged(self) -> bool:
        """True for a mail that is not as it was sent."""
        return not self.bodies and not self.flags & GAP

    @property
    def redelivered(self) -> bool:
        """True if all of them were sent before."""
        return bool(self.flags & REDELIVERED)

    def part(self, begin: int, end: int) -> MailRun:
        """Mails from index `begin` to below `end`; the run itself if these are all."""
        if begin == 0 and end == len(self.ends):
            return self
        start = self.ends[begin - 1] if begin else 0
        ends = [each - start for each in self.ends[begin:end]]
        return MailRun(self.place, self.first + begin, self.data[start : start + ends[-1]], ends, self.bodies[begin:end])

    def without_expired(self, now_ms: int) -> tuple[list[MailRun], list[int]]:
        """Split off expired mails. Returns the remaining runs and the expired InboxSeqs. `now_ms`: Unix milliseconds."""
        return self._without(lambda at: has_expired(self.data, at, now_ms))

    def without_load_tests(self) -> tuple[list[MailRun], list[int]]:
        """Split off mails of load tests. Returns the remaining runs and the InboxSeqs of these."""
        return self._without(lambda at: bool(self.data[at + RECORD_FLAGS_AT] & Flag.LOAD_TEST))

    def _without(self, goes: Callable[[int], bool]) -> tuple[list[MailRun], list[int]]:
        """Split off the mails whose records, at these places, go."""
        over = []
        start = 0
        for index, end in enumerate(self.ends):
            if goes(start + ENVELOPE_SIZE):
                over.append(index)
            start = end
        if not over:
            return [self], []
        parts = []
        begin = 0
        for index in (*over, self.count):
            if begin < index:
                parts.append(self.part(begin, index))
            begin = index + 1
        return parts, [self.first + index for index in over]

    def marked(self) -> MailRun:
        """Copy of the run, marked as sent before."""
        data = bytearray(self.data)
        start = 0
        for end in self.ends:
            data[start + FLAGS_AT] |= REDELIVERED
            start = end
        return MailRun(self.place._replace(flags=self.flags | REDELIVERED), self.first, bytes(data), self.ends, self.bodies)


def read_runs(data: bytes, count: int) -> list[MailRun]:
    """Decode a relay's mails, in order. Raises `MalformedData`: then none of them may be used."""
    runs: list[MailRun] = []
    open_place: Place | None = None
    """Place of the run that the next mail may belong to."""
    first = start = position = 0
    ends: list[int] = []
    bodies: list[bytes] = []
    for msg_id, seq, uin, session, device, lane, flags, record in split(data, count):
        if lane >= INBOX_LANES or not session or not seq:
            raise MalformedData(f"an envelope names lane {lane}, session {session}, InboxSeq {seq}")
        if len(record) > MAX_RECORD_BYTES:
            raise MalformedData(f"a record has {len(record)} bytes, and may have {MAX_RECORD_BYTES}")
        body = intact_body(record) if record else None
        place = Place(uin, device, session, lane, flags)
        if open_place is not None and (body is None or place != open_place or seq != first + len(ends)):
            runs.append(MailRun(open_place, first, data[start:position], ends, bodies))
            open_place = None
        if open_place is None:
            first, start, ends, bodies = seq, position, [], []
        position += ENVELOPE_SIZE + len(record)
        ends.append(position - start)
        if body is None:
            runs.append(MailRun(place, seq, data[start:position], ends, bodies, dropped=not record and not msg_id))
        else:
            bodies.append(body)
            open_place = place
    if open_place is not None:
        runs.append(MailRun(open_place, first, data[start:position], ends, bodies))
    return runs
