"""Messages to big rooms: 64 copies each, released slowly so that nobody else waits for them. Pure.

A copy to one VRoom is hundreds of writes in every gateway. Sent at once, the 64 copies would be ahead of everybody else's messages
in the sockets of brokers and gateways. So a big room's messages wait here and leave in *sweeps*: a sweep takes what waits for the
room and serves one VRoom after the other, `vrooms_per_s` of them a second; all messages of a sweep go to a VRoom in one parcel,
which a gateway joins into one write for each client. The busier the room, the more messages share a sweep. Big rooms take turns.

    room 1000:  m1 m2 m3 │ VRoom 64000 ▮▮▮  64001 ▮▮▮  64002 ▮▮▮ …  64063 ▮▮▮ │ next sweep: m4 m5
    time        ─────────┴──────┴─ 4 ms ──┴─────┴──────────────────────────────▶

Ordinary messages do not come here. A message is finished when all its copies are settled.

Each of a signal's copies is a message here: for every VRoom it goes to the replica that `proxy.records.signals` names for that
copy.

Source: PiXiu §2.2.2; docs/routing.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from cluster.core.contract import NEVER, SendRecords
from cluster.core.token_bucket import TokenBucket
from pixiu.ids import EndpointID
from pixiu.placement.big_rooms import VROOMS, vrooms_of
from pixiu.wire.record import FIRST_LANE_BELOW, KEY_AT, KIND_AT, LANE_FIRST, LANE_NORMAL, SENDER_AT, TYPE_AT, Kind, with_key

Owner = TypeVar("Owner")

MAX_SWEEP_BYTES: Final = 64 << 10
"""Bytes of the messages in one sweep, and so of the largest message to a big room."""
STEP_BYTES: Final = 8 << 10
"""Bytes for which a parcel counts as one more VRoom: beyond them the bytes cost more than the writes."""
MAX_WAIT_S: Final = 3.0
"""Longest wait, seconds; beyond it a message is refused with a retry-after: publishers leave a silent proxy after 5 s."""
MAX_WAITING_BYTES: Final = 8 << 20
"""Bytes that wait for all big rooms. Policy: as above."""
MAX_BURST_S: Final = 0.002
"""VRooms that may be served at once after a late timer, as seconds of the rate."""
MIN_WAIT_S: Final = 0.001
"""Shortest time of a timer, seconds."""


class _Message(Generic[Owner]):
    """A message to a big room, in flight."""

    __slots__ = ("lost", "owner", "record", "unsettled")

    def __init__(self, record: bytes, owner: Owner | None) -> None:
        self.record = record
        self.owner = owner
        self.unsettled = VROOMS
        self.lost = False


class Finished(Generic[Owner]):
    """A message whose copies are all settled. `lost`: some copies may be."""

    __slots__ = ("lost", "owner", "record")

    def __init__(self, record: bytes, owner: Owner | None, lost: bool) -> None:
        self.record = record
        self.owner = owner
        self.lost = lost


class _Room(Generic[Owner]):
    """A big room with something to send."""

    __slots__ = ("first", "id", "next", "normal", "sweep")

    def __init__(self, id: int) -> None:
        self.id = id
        self.first: deque[_Message[Owner]] = deque()
        self.normal: deque[_Message[Owner]] = deque()
        self.sweep: list[tuple[int, list[_Message[Owner]]]] = []
        """(lane, messages) of the present sweep."""
        self.next = 0
        """VRoom that the sweep serves next, 0 to 63; 0 also if there is no sweep."""


class BigRooms(Generic[Owner]):
    """The queue of messages to big rooms. `Owner` is the type of a message's owner, which is notified when the message is finished.

    Args:
        vrooms_per_s: VRooms served in a second, by all big rooms together.
        broker: the broker of a VRoom; None if there is none.
        signal_broker: the same for a signal to the VRoom, of this owner.
        next_token: gives a token for a parcel.
    """

    def __init__(
        self,
        vrooms_per_s: float,
        broker: Callable[[int], EndpointID | None],
        signal_broker: Callable[[int, bytes, Owner | None], EndpointID | None],
        next_token: Callable[[], int],
    ) -> None:
        self._rate = vrooms_per_s
        self._broker, self._signal_broker = broker, signal_broker
        self._next_token = next_token
        self._pace = TokenBucket(vrooms_per_s, vrooms_per_s * MAX_BURST_S, 0.0)
        self._rooms: dict[int, _Room[Owner]] = {}
        self._turns: deque[_Room[Owner]] = deque()
        self._parcels: dict[int, list[_Message[Owner]]] = {}
        self._due = 0.0
        """Time at which the rate allows more."""
        self.deadline = NEVER
        """Time at which `run` has something to do, monotonic seconds; `NEVER` when nothing waits."""
        self._waiting_bytes = 0
        self.copies = 0

    def set_pace(self, vrooms_per_s: float, now: float) -> None:
        """Serve `vrooms_per_s` VRooms a second from now on."""
        if vrooms_per_s != self._rate:
            self._rate, self._pace = vrooms_per_s, TokenBucket(vrooms_per_s, vrooms_per_s * MAX_BURST_S, now)

    @property
    def under_way(self) -> int:
        """Number of unsettled parcels and of rooms that have something to send."""
        return len(self._parcels) + len(self._turns)

    def offer(self, record: bytes, owner: Owner | None) -> float:
        """Take a message. Returns 0 if it was taken, else the seconds after which a retry may help.

        A room that has something waiting may take half of the space, so that one room does not keep out the others.
        """
        key = int.from_bytes(record[KEY_AT:SENDER_AT], "little")
        room, size = self._rooms.get(key), len(record)
        share = 1.0 if room is None else 0.5
        wait_s = VROOMS * (len(self._turns) + (self._waiting_bytes + size) / STEP_BYTES) / self._rate
        if self._turns and (wait_s > share * MAX_WAIT_S or self._waiting_bytes + size > share * MAX_WAITING_BYTES):
            return VROOMS * max(len(self._turns), self._waiting_bytes / STEP_BYTES) / self._rate
        if room is None:
            room = self._rooms[key] = _Room(key)
            self._turns.append(room)
            self.deadline = self._due
        (room.first if record[TYPE_AT] < FIRST_LANE_BELOW else room.normal).append(_Message(record, owner))
        self._waiting_bytes += size
        return 0.0

    def run(self, now: float) -> tuple[list[SendRecords], list[Finished[Owner]]]:
        """Release what is due. Returns the parcels to send, and the messages that are finished because brokers are missing."""
        parcels: list[SendRecords] = []
        finished: list[Finished[Owner]] = []
        while self._turns and not self._pace.wait_s(now):
            room = self._turns.popleft()
            self._pace.spend(self._serve(room, parcels, finished), now)
            if room.sweep or room.first or room.normal:
                self._turns.append(room)
            else:
                del self._rooms[room.id]
        self._due = now + max(self._pace.wait_s(now), MIN_WAIT_S)
        self.deadline = self._due if self._turns else NEVER
        return parcels, finished

    def settled(self, token: int, handled: bool) -> list[Finished[Owner]]:
        """Note the outcome of a parcel. Returns the messages that are finished."""
        finished: list[Finished[Owner]] = []
        for message in self._parcels.pop(token, ()):
            _copy_done(message, handled, finished)
        return finished

    def _serve(self, room: _Room[Owner], parcels: list[SendRecords], finished: list[Finished[Owner]]) -> float:
        """Send one VRoom its part of the sweep. Returns the cost, in VRooms."""
        if not room.sweep:
            room.sweep, room.next = self._sweep(room), 0
        vroom, cost = vrooms_of(room.id)[room.next], 0
        for lane, messages in room.sweep:
            for broker, part in self._by_broker(vroom, messages).items():
                if broker is None:
                    for message in part:
                        _copy_done(message, False, finished)
                    continue
                copies = [with_key(message.record, vroom) for message in part]
                token = self._next_token()
                self._parcels[token] = part
                awaited = any(message.owner is not None for message in part)
                parcels.append(SendRecords(broker, copies, lane, token, awaited))
                self.copies += len(copies)
                cost += sum(len(copy) for copy in copies)
        room.next += 1
        if room.next == VROOMS:
            self._waiting_bytes -= sum(len(message.record) for _, messages in room.sweep for message in messages)
            room.sweep = []
        return 1.0 + cost // STEP_BYTES

    def _by_broker(self, vroom: int, messages: list[_Message[Owner]]) -> dict[EndpointID | None, list[_Message[Owner]]]:
        """Messages of one sweep and lane by the broker that they go to; None: no broker."""
        found: dict[EndpointID | None, list[_Message[Owner]]] = {}
        ordinary = self._broker(vroom)
        for message in messages:
            is_signal = message.record[KIND_AT] == Kind.SIGNAL
            broker = self._signal_broker(vroom, message.record, message.owner) if is_signal else ordinary
            found.setdefault(broker, []).append(message)
        return found

    def _sweep(self, room: _Room[Owner]) -> list[tuple[int, list[_Message[Owner]]]]:
        """Take the messages of the next sweep: lane 0 first, at least one message."""
        size = 0
        found: list[tuple[int, list[_Message[Owner]]]] = []
        for lane, queue in ((LANE_FIRST, room.first), (LANE_NORMAL, room.normal)):
            taken: list[_Message[Owner]] = []
            while queue and (not size or size + len(queue[0].record) <= MAX_SWEEP_BYTES):
                message = queue.popleft()
                size += len(message.record)
                taken.append(message)
            if taken:
                found.append((lane, taken))
        return found


def _copy_done(message: _Message[Owner], handled: bool, finished: list[Finished[Owner]]) -> None:
    message.unsettled -= 1
    message.lost |= not handled
    if not message.unsettled:
        finished.append(Finished(message.record, message.owner, message.lost))
