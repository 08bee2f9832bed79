"""An MQTT session that outlives its connection, as the gateway of its client holds it: its filters, what of its inbox the client
gets, and the exchanges of QoS 2. Pure.

    SUBSCRIBE ─▶ filters ─▶ note in Pi, kept entries in routers (one for each room that a filter spans)
    inbox ─▶ `take` ─▶ its filters match? ─▶ QoS, identifiers ─▶ PUBLISH under the identifier of the place in the inbox
                         └ no: acknowledged        └ PUBREC was stored: PUBREL

A message of an inbox is not sent again before its place cannot come again: a relay sends a lane at most a window beyond the cursor
that Pi has.

Source: docs/mqtt.md, "Sessions".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from cluster.mqtt.events import Wanted
from cluster.mqtt.mail import FIRST_KEPT_ID, SEQ_BITS, SEQS, packet_id_of
from cluster.mqtt.outbound import Delivery, KeptDelivery
from cluster.mqtt.properties_in_records import qos_of, retain_of
from cluster.mqtt.subscriptions import NO_LOCAL, QOS_BITS, RETAIN_AS_PUBLISHED
from cluster.routers.places import place_of
from cluster.wire.v1 import kept_pb2
from gateway.delivery.fan_out import expires_at_ms_of
from gateway.mail.run import MailRun
from gateway.membership.rooms import PLAIN, merged
from gateway.sessions.states import InboundTable, Released, SessionFilter, SessionNote
from pixiu.ids import session_uin
from pixiu.placement.filter_tree import FilterTree
from pixiu.placement.topics import USER_PREFIX, Filter, parse_filter
from pixiu.wire.cursor import MAP_BITS
from pixiu.wire.envelope import ENVELOPE_SIZE
from pixiu.wire.record import FLAGS_AT, INBOX_LANES, Flag

LEAST_SLACK_S: Final = 900
SLACK_SHARE: Final = 10
"""A connected session's kept entries are valid for its expiry and this share of it more, at least `LEAST_SLACK_S`, from the last
renewal on: so renewals are rare."""
MOST_RENEWAL_S: Final = 6 * 3600
REMOVED_MS: Final = 86_400_000
"""Time for which routers remember a removed entry, ms."""
PUT_BITS: Final = 20
"""Bits of an entry's version that count a generation's puts."""
NEVER_RETAINED: Final = 2
"""Retain handling of filters that are restored."""


class Taken(NamedTuple):
    """Messages from the inbox, by what becomes of them."""

    kept: list[KeptDelivery]
    plain: list[Delivery]
    """Those that the client gets with QoS 0."""
    over: list[int]
    """Packet identifiers that nothing is sent for, and those of `plain`: acknowledged."""
    gaps: int
    """Markers of messages that the inbox lost."""


class Session:
    """A session with a connection here.

    Args:
        note: its filters and terms.
        generation: of this connection; no lower one may write the session's state any more.
        present: it was there before this connection.
    """

    __slots__ = (
        "_done", "_exact", "_highest", "_puts", "_wild", "dropped", "filters", "gaps", "generation", "inbound", "note", "present",
        "pruned", "released", "renew_at", "uin", "unmatched", "waiting",
    )  # fmt: skip

    def __init__(self, note: SessionNote, generation: int, *, present: bool) -> None:
        self.note, self.generation, self.present = note, generation, present
        self.uin = session_uin(note.uin, note.client_id)
        self.inbound, self.released = InboundTable(), Released()
        self.filters: dict[str, Wanted] = {}
        self._exact: dict[bytes, str] = {}
        self._wild: FilterTree[str] = FilterTree()
        self._done: set[int] = set()
        """Packet identifiers that this connection's client has acknowledged, and that may come again."""
        self._highest = [0] * INBOX_LANES
        self._puts = 0
        self.pruned = False
        """True if `released` has fewer identifiers than are stored."""
        self.renew_at = 0.0
        """Time of the next renewal, monotonic seconds."""
        self.gaps = self.unmatched = 0
        """Markers of lost messages since the connection began, and messages that no filter matched any more."""
        self.dropped = self.waiting = 0
        """As the connection began: messages that the inbox has lost, ever, and those that waited in it."""
        for found in note.filters:
            options = found.options
            rap = bool(options & RETAIN_AS_PUBLISHED)
            self._add(Wanted(found.filter, found.qos, bool(options & NO_LOCAL), rap, NEVER_RETAINED, found.identifier, True))

    # --- filters

    def add(self, filters: Iterable[Wanted]) -> list[str]:
        """Add filters with what was granted, or change their options. Returns those that are kept no longer."""
        before = {name for name, wanted in self.filters.items() if wanted.kept}
        changed = [self._add(wanted) for wanted in filters]
        return [wanted.filter for wanted in changed if wanted.filter in before and not wanted.kept]

    def remove(self, names: Iterable[str]) -> list[str]:
        """Remove filters. Returns those that were there."""
        found: list[str] = []
        for name in names:
            if self.filters.pop(name, None) is None:
                continue
            found.append(name)
        self.withhold(found)
        return found

    def withhold(self, names: Iterable[str]) -> None:
        """Give the client nothing for filters any more, which stay in the session until they are removed."""
        for text in [name.encode() for name in names]:
            if self._exact.pop(text, None) is None and self._wild.get(text) is not None:
                self._wild.remove(text)

    def _add(self, wanted: Wanted) -> Wanted:
        name = wanted.filter
        parsed = parse_filter(name)
        keepable = isinstance(parsed, Filter) and is_keepable(parsed)
        wanted = self.filters[name] = wanted._replace(kept=keepable and wanted.qos > 0)
        if keepable and isinstance(parsed, Filter) and parsed.wild:
            self._wild.put(name.encode(), name)
        elif keepable:
            self._exact[name.encode()] = name
        return wanted

    def state(self, now_ms: int, *, connected: bool = True) -> bytes:
        """Encode the session as its note. Raises `LimitError`."""
        note = self.note
        note.connected, note.ended_at_ms = connected, now_ms
        note.filters = [
            SessionFilter(name, wanted.qos, options_byte(wanted), wanted.identifier) for name, wanted in self.filters.items()
        ]
        return note.encode()

    def entries(
        self, names: Iterable[str], rooms_of: Callable[[Filter], Sequence[int]], now_ms: int, *, removed: bool = False
    ) -> dict[str, list[kept_pb2.KeptEntry]]:
        """Entries for routers of filters that are kept, by filter; those of QoS 0 are removed."""
        version, until_ms = self._next_put(now_ms)
        found: dict[str, list[kept_pb2.KeptEntry]] = {}
        for name in names:
            parsed, wanted = parse_filter(name), self.filters.get(name)
            if not isinstance(parsed, Filter) or not is_keepable(parsed):
                continue
            gone = removed or wanted is None or not wanted.qos
            no_local = wanted is not None and wanted.no_local
            found[name] = [
                kept_pb2.KeptEntry(
                    room=room, session=self.uin, filter=name, version=version, removed=gone, no_local=no_local,
                    until_ms=now_ms + REMOVED_MS if gone else until_ms,
                )
                for room in rooms_of(parsed)
            ]  # fmt: skip
        return found

    def place(self, now_ms: int, limit: int = 0, *, removed: bool = False) -> list[kept_pb2.KeptEntry]:
        """The entry for routers of its place among the sessions of its tenant; none without one. `limit`: of that tenant, for a
        session that begins."""
        if not self.note.tenant:
            return []
        (name, room), (version, until_ms) = place_of(self.note.tenant), self._next_put(now_ms)
        until_ms = now_ms + REMOVED_MS if removed else until_ms
        return [
            kept_pb2.KeptEntry(
                room=room, session=self.uin, filter=name, version=version, removed=removed, until_ms=until_ms, limit=limit
            )
        ]  # fmt: skip

    def _next_put(self, now_ms: int) -> tuple[int, int]:
        """The version of entries that are put now, and Unix milliseconds until when they are valid."""
        self._puts += 1
        version = self.generation << PUT_BITS | min(self._puts, (1 << PUT_BITS) - 1)
        return version, now_ms + (self.note.expiry_s + slack_s(self.note.expiry_s)) * 1000

    # --- the inbox

    def take(self, runs: Sequence[MailRun]) -> Taken:
        """Take messages of the inbox, and see what the client gets of them."""
        taken = Taken([], [], [], sum(run.gap for run in runs))
        self.gaps += taken.gaps
        for run in runs:
            self._highest[run.lane] = max(self._highest[run.lane], run.last)
            if run.gap:
                continue
            start = 0
            for index, end in enumerate(run.ends):
                packet_id = FIRST_KEPT_ID + packet_id_of(run.lane, run.first + index)
                record = run.data[start + ENVELOPE_SIZE : end]
                self._take_one(packet_id, record, run.bodies[index], run.redelivered, taken)
                start = end
        self._prune()
        return taken

    def _take_one(self, packet_id: int, record: bytes, body: bytes, again: bool, taken: Taken) -> None:
        topic = body[2 : 2 + (body[0] << 8 | body[1])] if record[FLAGS_AT] & Flag.TOPIC and len(body) >= 2 else b""
        options = [self.filters[name] for name in self._matching(topic)] if topic else []
        if packet_id in self.released.packet_ids and packet_id not in self._done:
            # Also if no filter matches any more: the client waits for its PUBREL.
            taken.kept.append(KeptDelivery(packet_id, Delivery(record, topic, 2, False), True, released=True))
            return
        grant = merged(options) if options else PLAIN
        if packet_id in self._done or not grant.kept:
            self.unmatched += not grant.kept
            taken.over.append(packet_id)
            return
        qos = min(qos_of(record), grant.qos)
        retain = retain_of(record) and grant.retain_as_published
        delivery = Delivery(record, topic, qos, retain, grant.identifiers, expires_at_ms_of(record))
        if qos:
            taken.kept.append(KeptDelivery(packet_id, delivery, again))
        else:
            taken.plain.append(delivery)
            taken.over.append(packet_id)

    def _matching(self, topic: bytes) -> list[str]:
        exact = self._exact.get(topic)
        wild = self._wild.match(topic) if not topic.startswith((b"room/", b"user/")) else []
        return [exact, *wild] if exact is not None else wild

    def done(self, packet_ids: Iterable[int]) -> list[int]:
        """Note that the client is done with messages. Returns their identifiers as those of mail."""
        self._done.update(packet_ids)
        return [packet_id - FIRST_KEPT_ID for packet_id in packet_ids]

    def _prune(self) -> None:
        """Forget what cannot come again."""
        if len(self._done) > INBOX_LANES * MAP_BITS:
            self._done = {packet_id for packet_id in self._done if self._may_come(packet_id)}
        gone = [packet_id for packet_id in self.released.packet_ids if not self._may_come(packet_id)]
        if gone:
            self.released.packet_ids.difference_update(gone)
            self.pruned = True

    def _may_come(self, packet_id: int) -> bool:
        lane, number = packet_id - FIRST_KEPT_ID >> SEQ_BITS, (packet_id & SEQS) - 1
        highest = self._highest[lane]
        # Seen from the highest one: twice a window back, or a window ahead, which an earlier connection got.
        return not highest or (highest + MAP_BITS - number) % SEQS <= 3 * MAP_BITS


def is_keepable(parsed: Filter) -> bool:
    """True if messages for a filter are kept while its session has no connection: those of topics and rooms, for it alone."""
    return not parsed.group and parsed.name[0] != "$" and not parsed.name.startswith(USER_PREFIX)


def slack_s(expiry_s: int) -> int:
    """Time by which a session's kept entries outlive its expiry, seconds."""
    return max(LEAST_SLACK_S, expiry_s // SLACK_SHARE)


def renewal_s(expiry_s: int) -> int:
    """Interval at which a connected session is renewed, seconds."""
    return min(slack_s(expiry_s) // 3, MOST_RENEWAL_S)


def is_over(note: SessionNote, now_ms: int) -> bool:
    """True if a session ended too long ago. One whose gateway died ended within an interval of its last renewal; one without an
    expiry belongs to one connection alone."""
    after_s = note.expiry_s + (renewal_s(note.expiry_s) if note.connected and note.expiry_s else 0)
    return now_ms >= note.ended_at_ms + after_s * 1000


def options_byte(wanted: Wanted) -> int:
    """The options of a filter, as SUBSCRIBE has them."""
    return wanted.qos & QOS_BITS | wanted.no_local * NO_LOCAL | wanted.retain_as_published * RETAIN_AS_PUBLISHED
