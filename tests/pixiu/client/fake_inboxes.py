"""The inboxes of the cluster in the test: what relays and gateways do with them, for tests of the SDK.

Each device has what it acknowledged; each login is a session, and gets what it has not, in order, at most a window beyond.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from pixiu.ids import msg_id, snowflake
from pixiu.wire.envelope import GAP, REDELIVERED, encode
from pixiu.wire.record import Kind
from pixiu.wire.record import encode as record_of
from pixiu.wire.v1 import wire_pb2

WINDOW = 64
SENT_MS = 1_700_000_000_000


@dataclass
class Session:
    """A login of a device."""

    queue: asyncio.Queue[wire_pb2.SubscribeReply | None]
    uin: int
    device: tuple[str, int]
    number: int
    written: set[tuple[int, int]] = field(default_factory=set)


class FakeInboxes:
    """See the module."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        """(UIN, lane) → (MsgID, record; empty: gone), InboxSeq from 1."""
        self.acknowledged: dict[tuple[int, tuple[str, int], int], set[int]] = {}
        """(UIN, device, lane) → InboxSeqs."""
        self.sent: set[tuple[int, tuple[str, int], int, int]] = set()
        self.sessions: list[Session] = []
        self.deaf = False
        """Acknowledgements are lost."""
        self.ranges: list[tuple[int, int, int]] = []
        """All that came."""
        self.damage = 0
        """So many of the next records are damaged on the way."""
        self._sessions = 0
        self._messages = 0

    def put(self, uin: int, payload: bytes, lane: int = 1, **fields: Any) -> int:
        """A mail. Returns its MsgID."""
        self._messages += 1
        record = record_of(Kind.MAIL, uin, payload, snowflake(SENT_MS, 3, self._messages), sender=9, type=lane << 6, **fields)
        return self.entry(uin, lane, msg_id(1, 0, self._messages), record)

    def entry(self, uin: int, lane: int, number: int, record: bytes) -> int:
        """An entry as it is; an empty record: the message is gone."""
        self.entries.setdefault((uin, lane), []).append((number, record))
        self.go_on()
        return number

    def missing(self, uin: int, device: tuple[str, int], lane: int = 1) -> list[int]:
        """InboxSeqs that a device has not acknowledged."""
        has = self.acknowledged.get((uin, device, lane), set())
        return [seq for seq in range(1, len(self.entries.get((uin, lane), [])) + 1) if seq not in has]

    def opened(self, queue: asyncio.Queue[wire_pb2.SubscribeReply | None], hello: wire_pb2.SubscribeHello) -> None:
        """A login."""
        self._sessions += 1
        device = (hello.client, hello.device) if not hello.device else ("", hello.device)
        self.sessions = [each for each in self.sessions if (each.uin, each.device) != (hello.uin, device)]
        self.sessions.append(Session(queue, hello.uin, device, self._sessions))
        self.go_on()

    def closed(self, queue: asyncio.Queue[wire_pb2.SubscribeReply | None]) -> None:
        """A connection is gone."""
        self.sessions = [each for each in self.sessions if each.queue is not queue]

    def take(self, queue: asyncio.Queue[wire_pb2.SubscribeReply | None], items: list[wire_pb2.MailAcknowledgement]) -> None:
        """What a client acknowledges."""
        for session in self.sessions:
            if session.queue is not queue:
                continue
            for item in items:
                self.ranges.append((item.lane, item.first, item.last))
                has = self.acknowledged.setdefault((session.uin, session.device, item.lane), set())
                for seq in range(item.first, item.last + 1):
                    assert (item.lane, seq) in session.written or self.deaf, "an acknowledgement of what did not come"
                    if not self.deaf:
                        has.add(seq)
        self.go_on()

    def go_on(self) -> None:
        """Send what the windows take."""
        for session in self.sessions:
            for lane in range(4):
                missing = self.missing(session.uin, session.device, lane)
                found = [seq for seq in missing if seq < missing[0] + WINDOW and (lane, seq) not in session.written]
                if found:
                    self.send(session, lane, found)

    def send(self, session: Session, lane: int, seqs: list[int]) -> None:
        """Write entries to a session's connection."""
        data = b""
        for seq in seqs:
            session.written.add((lane, seq))
            number, record = self.entries[session.uin, lane][seq - 1]
            mark = (session.uin, session.device, lane, seq)
            flags = (REDELIVERED if mark in self.sent else 0) | (0 if record else GAP)
            self.sent.add(mark)
            if self.damage and record:
                self.damage -= 1
                record = record[:-1] + bytes([record[-1] ^ 1])
            data += encode(number, seq, session.uin, session.number, 1, lane, flags, record)
        session.queue.put_nowait(wire_pb2.SubscribeReply(mail=data, mail_count=len(seqs)))
