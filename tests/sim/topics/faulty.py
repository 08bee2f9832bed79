"""Cores and stores of topics with one fault each: what the simulation must find."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from cluster.replication.core.events import Accepted
from cluster.store.events import LeaderChanged
from cluster.topics import entries as en
from pixiu.errors import PixiuError
from topic import events as ev
from topic.core import Core, _Report, _reported, _Request
from topic.dispatch.dispatcher import Dispatcher, Queue
from topic.dispatch.flights import Pending
from topic.dispatch.lanes import Lane, Lanes
from topic.dispatch.sorting import Sorter
from topic.state.channels import Progress
from topic.state.rows import Kind
from topic.state.state import Sealed, State
from topic.storage.part_log import Writing
from topic.storage.store import Flush, Store


class AnswersSealsEarly(Core):
    """A seal is answered when it is in the leader's log: a child opens before the seal commits."""

    def _on_requested(self, event: ev.Requested, now: float, out: list[ev.Effect]) -> None:
        if event.kind == en.SEAL:
            self.__dict__.setdefault("seals", {})[event.request] = event.payload
        super()._on_requested(event, now, out)

    def _on_accepted(self, event: Accepted, now: float, out: list[ev.Effect]) -> None:
        works = list(self._proposed.get(event.token, ()))
        super()._on_accepted(event, now, out)
        for work in works:
            payload = self.__dict__.get("seals", {}).get(work.request) if isinstance(work, _Request) else None
            if payload is not None:
                number, children = en.decode_seal(payload)
                part, channels = self._state.parts[number], self._state.channels_of(en.topic_of(number))
                out.append(ev.Reply(work.request, Sealed(number, part.end, children, part.known_writers(), channels)))


class CountsEarly(Core):
    """An acknowledgement counts when it is proposed, before its commit."""

    def _on_reported(self, event: ev.Reported, now: float, out: list[ev.Effect]) -> None:
        before = len(self._turn)
        super()._on_reported(event, now, out)
        for work, _ in self._turn[before:]:
            if isinstance(work, _Report):
                out.append(_reported(work))


class DeliversAtOnce(Core):
    """A leader delivers before an entry of its own is applied."""

    def _on_leader(self, event: LeaderChanged, now: float, out: list[ev.Effect]) -> None:
        super()._on_leader(event, now, out)
        self.delivers = bool(self.epoch)
        if self.epoch:
            self._channels.look(now, out)


class _ImpatientLanes(Lanes):
    def take(self, tag: str, limit: int, sharers: int, end: int, now: float) -> list[ev.Run]:
        for slot, lane in self._lanes.items():
            if lane.waiting:
                self._enter(slot, lane)
        return super().take(tag, limit, sharers, end, now)

    def _is_free(self, lane: Lane) -> bool:
        return True


class _SharesLanes(Dispatcher):
    def lanes(self, progress: Progress, sorter: Sorter, clock_us: int, now: float) -> Lanes:
        return _ImpatientLanes(progress, sorter, clock_us, now)


class SharesLanes(Core):
    """A lane goes to a member while another one still has messages of it."""

    def dispatcher(self, settings: en.ChannelSettings) -> Dispatcher:
        return _SharesLanes(settings, self._state, self._parts.blocks, self.clock, self.paces)


class _ForgetsParents(Dispatcher):
    def _find_finished(self) -> None:
        for number, queue in list(self._blocked.items()):
            queue.missing.clear()
            self._unblock(number, queue)


class ForgetsParents(Core):
    """A channel begins with a part before it has finished the part's parents."""

    def dispatcher(self, settings: en.ChannelSettings) -> Dispatcher:
        return _ForgetsParents(settings, self._state, self._parts.blocks, self.clock, self.paces)


class _LeavesUnwanted(Dispatcher):
    def _skip(self, part: int, queue: Queue, now: float) -> list[Pending]:
        super()._skip(part, queue, now)
        return []


class LeavesUnwanted(Core):
    """A message that a filter does not want is left unacknowledged."""

    def dispatcher(self, settings: en.ChannelSettings) -> Dispatcher:
        return _LeavesUnwanted(settings, self._state, self._parts.blocks, self.clock, self.paces)


class _GivesEarly(Dispatcher):
    def report(
        self,
        member: int,
        part: int,
        acknowledged: Sequence[tuple[int, int]],
        refused: Sequence[tuple[int, float]],
        rejected: Sequence[tuple[int, str]] = (),
    ) -> Pending | None:
        pending = super().report(member, part, acknowledged, refused, rejected)
        for each in pending.settlement.deferred if pending else ():
            self.queues[part].ready.again(each.offset, each.offset + 1, 0.0)
        return pending


class GivesEarly(Core):
    """A message that a member refuses is given to another before that is committed."""

    def dispatcher(self, settings: en.ChannelSettings) -> Dispatcher:
        return _GivesEarly(settings, self._state, self._parts.blocks, self.clock, self.paces)


class Hurries(Core):
    """A message is given before its time."""

    def dispatcher(self, settings: en.ChannelSettings) -> Dispatcher:
        return Dispatcher(settings, self._state, self._parts.blocks, lambda now: self.clock(now) + 1_000_000, self.paces)


class TrimsBeforeSync(Store):
    """The journal is trimmed before the segments are synced."""

    def _sync(self, parts: Sequence[Writing]) -> None:
        pass


class IgnoresFailures(Store):
    """A flush that the disk did not take counts as done."""

    def write(self, flush: Flush) -> None:
        with suppress(PixiuError):
            super().write(flush)


class _Forgets(State):
    def changes(self) -> list[tuple[bytes, bytes | None]]:
        return [(key, value) for key, value in super().changes() if key[:1] != Kind.WRITER.value]


class ForgetsWriters(Store):
    """What a writer has stored is the leader's memory: it is lost when a leader changes."""

    def open(self) -> None:
        self.state = _Forgets(self)
        super().open()
