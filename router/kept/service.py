"""A router's kept filters: a replicated table that shows which sessions a message is for, and the marks of its rooms.

    gateway ── Put ──▶ replica ──▶ database and peers    ┐
                          └── mark of the room ──▶ brokers ┴──▶ the answer
    proxy ── Match ──▶ replica ──▶ sessions

A replica with an entry makes sure that the room is marked before it confirms the entry, also to its peers. Only the lowest replica
removes marks, and only of rooms that were empty at two comparisons with every replica of the partition, a minute apart.

Source: docs/subscriptions.md, "Kept filters".
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio

from cluster.membership import events as ev
from cluster.wire.v1 import kept_pb2, kept_pb2_grpc
from pixiu.errors import PixiuError, WrongPartition
from pixiu.ids import KEPT_INSTANCE
from pixiu.placement.partition import serves
from router.core import Core
from router.kept.table import Entry, KeptTable
from router.replicated.service import PUT_TIMEOUT_S, Form, Replicated, now_ms

MAX_QUESTIONS: Final = 1_000
"""Questions of one call. Policy: more are refused."""
ROOMS_A_MARK: Final = 1_000
"""Rooms of one request to the core."""
SWEEP_S: Final = 60.0
"""Interval at which marks of rooms without filters are looked for; they are removed at the next one."""
FULL: Final = "the routers keep as many filters as they may (router.kept_filters, router.kept_mb): end unused sessions, or raise it"
CROWDED: Final = "the room has the filters of as many sessions as it may (router.kept_sessions_per_room)"
TENANT_FULL: Final = "the tenant has as many sessions that outlive their connections as it may (kept_sessions of its table)"
MAP_FULL: Final = "the routers' map of memberships is full: raise router.max_entries on every replica"
MARKS_LATE: Final = "marks_late"
NOT_MARKED: Final = "not every router and broker of the room has taken its mark in time; try again"
MOVED: Final = "the room belongs to another router partition now; try again"


def entry_of(wire: kept_pb2.KeptEntry) -> Entry:
    """An entry as the table has it."""
    return Entry(
        wire.room, wire.session, wire.filter.encode(), wire.version, wire.until_ms, not wire.removed, wire.no_local, wire.limit
    )  # fmt: skip


def wire_of(entry: Entry) -> kept_pb2.KeptEntry:
    """An entry as it is sent."""
    return kept_pb2.KeptEntry(
        room=entry.room,
        session=entry.session,
        filter=entry.filter.decode(),
        version=entry.version,
        until_ms=entry.expires_at_ms,
        removed=not entry.live,
        no_local=entry.no_local,
        limit=entry.limit,
    )


FORM: Final = Form(
    name="kept",
    what="kept filters",
    option="router.kept_mb",
    wire=kept_pb2,
    prefix="Kept",
    stub=kept_pb2_grpc.KeptStub,
    read=entry_of,
    write=wire_of,
)


class _Request(NamedTuple):
    """Rooms that are being marked."""

    done: asyncio.Future[bool]
    """False: the map is full."""
    rooms: tuple[int, ...]


class Marks:
    """Marks rooms in the map of memberships, through the router's core.

    Args:
        core: the router's core.
        step: gives events to it.
        has_filters: gives True if a room has kept filters here.
    """

    def __init__(self, core: Core, step: Callable[[ev.Event], None], has_filters: Callable[[int], bool]) -> None:
        self._core, self._step, self._has_filters = core, step, has_filters
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count(1)
        self._under_way: dict[int, int] = {}
        """Room → the request that marks it."""
        self._confirmed: set[int] = set()
        """Rooms whose mark was confirmed to this replica."""
        self._empty: set[int] = set()
        """Marked rooms that had no filters at the last look."""
        self._looked_at = time.monotonic()
        self.made = self.removed = 0

    async def ensure(self, rooms: Iterable[int]) -> str:
        """Wait until rooms are marked everywhere. Returns the reason of a failure; empty: they are."""
        waits: dict[int, None] = {}
        new: list[int] = []
        for room in dict.fromkeys(rooms):
            number = self._under_way.get(room)
            if number is not None:
                waits[number] = None
            elif room not in self._confirmed or not self._core.is_marked(room):
                new.append(room)
        waits.update(dict.fromkeys(self.mark(new)))
        # The core may have done it in the same step.
        requests = {number: request for number in waits if (request := self._requests.get(number)) is not None}
        futures = [request.done for request in requests.values()]
        if not futures:
            return "" if all(room in self._confirmed for room in new) else MAP_FULL
        done, late = await asyncio.wait(futures, timeout=PUT_TIMEOUT_S)
        for number, request in requests.items():
            if request.done in late:
                self._end(number)  # the next caller begins again
        return NOT_MARKED if late else "" if all(each.result() for each in done) else MAP_FULL

    def mark(self, rooms: Sequence[int]) -> list[int]:
        """Begin to mark rooms. Returns the numbers of the requests."""
        numbers: list[int] = []
        for start in range(0, len(rooms), ROOMS_A_MARK):
            part, number = tuple(rooms[start : start + ROOMS_A_MARK]), next(self._numbers)
            self._requests[number] = _Request(asyncio.get_running_loop().create_future(), part)
            self._under_way.update(dict.fromkeys(part, number))
            numbers.append(number)
            self._step(ev.MarkRooms(number, part, True, now_ms()))
        self.made += len(rooms)
        return numbers

    def marked(self, effect: ev.RoomsMarked) -> None:
        """Note that the core has done a request."""
        request = self._end(effect.request)
        if request is None:
            return
        if not effect.refused:
            self._confirmed.update(request.rooms)
        request.done.set_result(not effect.refused)

    def _end(self, number: int) -> _Request | None:
        request = self._requests.pop(number, None)
        for room in request.rooms if request is not None else ():
            if self._under_way.get(room) == number:
                del self._under_way[room]
        return request

    def lost(self, effect: ev.MarksLost) -> None:
        """Mark rooms again that another replica took for empty."""
        rooms = [room for room in effect.rooms if self._has_filters(room)]
        self.mark(rooms)

    def look(self, *, may_remove: bool) -> None:
        """Remove marks of rooms that have had no filters since the last look, once a minute."""
        if time.monotonic() - self._looked_at < SWEEP_S:
            return
        self._looked_at = time.monotonic()
        before, self._empty = self._empty, set()
        if not may_remove:
            return
        found = {room for room in self._core.membership.groups_of(KEPT_INSTANCE) if not self._has_filters(room)}
        gone = sorted(found & before)
        self._empty = found - before
        for start in range(0, len(gone), ROOMS_A_MARK):
            self._step(ev.MarkRooms(0, tuple(gone[start : start + ROOMS_A_MARK]), False, now_ms()))
        self._confirmed.difference_update(gone)
        self.removed += len(gone)


class KeptService(Replicated[Entry], kept_pb2_grpc.KeptServicer):
    """Serves the kept filters of one router; takes the arguments of `Replicated`.

    Args:
        max_filters: limit of kept filters.
        max_bytes: limit of their bytes.
        max_sessions: limit of sessions in one room.
        core: the router's core, which reports to brokers which rooms have filters.
        step: gives events to it.
        lowest: gives True if this replica is the lowest of its partition, and every one of these in the registry is Running.
    """

    def __init__(
        self,
        *,
        max_filters: int,
        max_bytes: int,
        max_sessions: int,
        core: Core,
        step: Callable[[ev.Event], None],
        lowest: Callable[[], bool],
        **shell: Any,
    ) -> None:
        self.table = KeptTable(max_filters, max_bytes, max_sessions)
        super().__init__(FORM, self.table, max_bytes=max_bytes, **shell)
        self._core, self._lowest = core, lowest
        self.marks = Marks(core, step, self.table.has_room)
        self.questions = self.matches = 0

    async def mark_all(self) -> None:
        """Mark the rooms with filters whose marks this replica lacks, before brokers take its word for memberships."""
        if problem := await self.marks.ensure([room for room in self.table.rooms if not self._core.is_marked(room)]):
            self._log.warning(MARKS_LATE, text=problem)

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {
            **super().samples(),
            "kept_filters": len(self.table),
            "kept_removed": self.table.removed,
            "kept_rooms": len(self.table.rooms),
            "kept_marks_made_total": self.marks.made,
            "kept_marks_removed_total": self.marks.removed,
            "kept_questions_total": self.questions,
            "kept_matches_total": self.matches,
        }

    async def Match(self, request: kept_pb2.KeptQuestions, context: grpc.aio.ServicerContext[Any, Any]) -> kept_pb2.KeptAnswers:
        """Sessions, see the proto."""
        if len(request.questions) > MAX_QUESTIONS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_QUESTIONS} questions in a call")
        now, match, (partition, partitions) = now_ms(), self.table.match, self._rule()
        answers = []
        for question in request.questions:
            if not serves(partition, question.room, partitions):
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, MOVED)
            found = match(partition, question.room, question.topic, question.session, now)
            self.matches += bool(found)
            answers.append(kept_pb2.KeptAnswer(sessions=found))
        self.questions += len(answers)
        return kept_pb2.KeptAnswers(answers=answers)

    async def Count(self, request: kept_pb2.KeptCountRequest, context: grpc.aio.ServicerContext[Any, Any]) -> kept_pb2.KeptCounts:
        """Sessions with a place, see the proto."""
        if len(request.places) > MAX_QUESTIONS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_QUESTIONS} questions in a call")
        return kept_pb2.KeptCounts(sessions=[self.table.places(place.encode()) for place in request.places])

    async def List(self, request: kept_pb2.KeptListRequest, context: grpc.aio.ServicerContext[Any, Any]) -> kept_pb2.KeptList:
        """A slice, see the proto."""
        found, after = self.table.listing(request.session, request.after, request.limit)
        return kept_pb2.KeptList(entries=[wire_of(entry) for entry in found], next=after)

    def _outcome(self, newest: Entry) -> kept_pb2.KeptOutcome:
        return kept_pb2.KeptOutcome(version=newest.version)

    def _misplaced(self, entry: Entry) -> PixiuError | None:
        partition, partitions = self._rule()
        return None if serves(partition, entry.room, partitions) else WrongPartition(MOVED)

    def _full(self, entry: Entry) -> str:
        if not self.table.crowded(entry):
            return FULL
        return TENANT_FULL if entry.is_place else CROWDED

    async def _settled(self, entries: Sequence[Entry]) -> str:
        return await self.marks.ensure(entry.room for entry in entries if self.table.has_room(entry.room))

    async def _tend(self, whole: bool) -> None:
        await self.mark_all()
        self.marks.look(may_remove=whole and self._lowest())
