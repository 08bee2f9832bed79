"""What must hold of deliveries: looked at with every effect of every relay, and at the end.

What is wrong is noted, not raised, so that a run with a fault put back shows all that it leads to.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pixiu.wire.envelope import GAP, REDELIVERED, Delivery
from pixiu.wire.record import INBOX_LANES
from relay.delivery import events as ev
from relay.delivery.states import State
from relay.delivery.window import WINDOW

if TYPE_CHECKING:
    from tests.sim.delivery.world import Relay, World


@dataclass
class Sent:
    """What one relay sent to one device in one lane under one session."""

    highest: int = 0
    open: set[int] = field(default_factory=set)
    """Not acknowledged to the relay."""
    done: set[int] = field(default_factory=set)
    saved_up_to: int = 0


class Watch:
    """See the module."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violations: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self._sent: dict[tuple[int, int, int, int, int], Sent] = {}
        """(relay's start, UIN, device, session, lane)."""
        self._ever: set[tuple[int, int, int, int, int]] = set()
        """(relay's start, UIN, device, lane, InboxSeq): sent."""
        self._fenced: set[tuple[int, int, int, int]] = set()
        """(relay's start, UIN, device, session): Pi has said so, and the relay knows."""

    def bad(self, what: str, where: object) -> None:
        """Note a violation."""
        self.violations.append((what, f"at {self.world.now:.3f}: {where}"))

    def lane(self, start: int, uin: int, device: int, session: int, lane: int) -> Sent:
        """What was sent."""
        return self._sent.setdefault((start, uin, device, session, lane), Sent())

    # --- a relay sends

    def delivered(self, relay: Relay, delivery: Delivery) -> None:
        """An envelope leaves a relay."""
        uin, device, lane, seq = delivery.uin, delivery.device, delivery.lane, delivery.seq
        self.counts["sent"] += 1
        if (relay.start, uin, device, delivery.session) in self._fenced:
            self.bad("sent after it was fenced", delivery[:7])
        sent = self.lane(relay.start, uin, device, delivery.session, lane)
        if seq > sent.highest:
            self._in_order(sent, delivery)
        sent.highest = max(sent.highest, seq)
        if seq not in sent.done:
            sent.open.add(seq)
        floor = self.world.pi.floor(uin, lane)  # what the inbox has dropped is not waited for
        if len(sent.open) > WINDOW and sum(number > floor for number in sent.open) > WINDOW:
            self.bad("window not kept", (delivery[:7], len(sent.open)))
        key = (relay.start, uin, device, lane, seq)
        if not delivery.flags & GAP and (key in self._ever) != bool(delivery.flags & REDELIVERED):
            self.bad("marked wrongly", delivery[:7])
        self._ever.add(key)
        if delivery.flags & REDELIVERED:
            self.counts["sent again"] += 1
        if delivery.flags & GAP:
            self._gap(delivery)
        else:
            self._right_message(delivery)

    def _in_order(self, sent: Sent, delivery: Delivery) -> None:
        pi, (_, seq, uin, _, device, lane, _, _) = self.world.pi, delivery
        floor = pi.floor(uin, lane)
        for earlier in range(max(sent.highest, floor) + 1, seq):
            if earlier not in sent.done and not pi.has(uin, device, lane, earlier):
                self.bad("an entry was passed over", (earlier, delivery[:7]))
                return

    def _gap(self, delivery: Delivery) -> None:
        pi = self.world.pi
        if delivery.msg_id:
            self.counts["gone"] += 1
            if delivery.msg_id not in self.world.xiu.gone:
                self.bad("a gap where there is none", delivery[:7])
        else:
            self.counts["gap markers"] += 1
            if delivery.seq > pi.floor(delivery.uin, delivery.lane):
                self.bad("a gap where there is none", delivery[:7])
            newest = delivery.session == pi.session(delivery.uin, delivery.device)  # a former owner knows no better
            if newest and delivery.seq <= pi.up_to(delivery.uin, delivery.device, delivery.lane):
                self.bad("a gap that was acknowledged", delivery[:7])

    def _right_message(self, delivery: Delivery) -> None:
        if self.world.inboxes.get((delivery.uin, delivery.lane), {}).get(delivery.seq) != delivery.msg_id:
            self.bad("another message than the inbox has", delivery[:7])
        if self.world.xiu.records[delivery.msg_id] != delivery.record:
            self.bad("another record than was stored", delivery[:7])

    # --- acknowledgements

    def acknowledged(self, relay: Relay, item: ev.Acknowledgement) -> None:
        """A relay is told what a device has got."""
        sent = self.lane(relay.start, item.uin, item.device, item.session, item.lane)
        named = {seq for seq in sent.open if seq <= item.up_to or item.bits >> (seq - item.up_to - 1) & 1}
        sent.open -= named
        sent.done |= named

    def saves(self, relay: Relay, item: ev.Acknowledgement) -> None:
        """A cursor leaves a relay."""
        sent = self.lane(relay.start, item.uin, item.device, item.session, item.lane)
        if item.up_to < sent.saved_up_to:
            self.bad("a cursor moved back", item)
        sent.saved_up_to = item.up_to
        pi = self.world.pi
        floor = pi.floor(item.uin, item.lane)
        for seq in (item.up_to, *(item.up_to + 1 + bit for bit in range(64) if item.bits >> bit & 1)):
            if seq > max(sent.highest, floor) and not pi.has(item.uin, item.device, item.lane, seq):
                self.bad("acknowledged beyond what was sent", item)
                return

    def taken(self, item: ev.Acknowledgement) -> None:
        """Pi is about to take a cursor."""
        pi, client = self.world.pi, self.world.clients[item.uin, item.device]
        if client.rogue:
            return
        floor, before = pi.floor(item.uin, item.lane), pi.up_to(item.uin, item.device, item.lane)
        named = [*range(before + 1, item.up_to + 1), *(item.up_to + 1 + bit for bit in range(64) if item.bits >> bit & 1)]
        for seq in named:
            if seq > floor and seq not in client.got[item.lane] and not pi.has(item.uin, item.device, item.lane, seq):
                self.bad("acknowledged, not delivered", (seq, item))
                return

    def fenced(self, relay: Relay, uin: int, device: int, session: int) -> None:
        """A relay is told that a session is not the newest."""
        self.counts["fenced"] += 1
        self._fenced.add((relay.start, uin, device, session))

    # --- the end

    def open_work(self) -> list[tuple[str, str]]:
        """What is not as it must be when the faults are over."""
        world, found = self.world, []
        for (uin, device), client in world.clients.items():
            for lane in range(INBOX_LANES):
                last, up_to = world.pi.last(uin, lane), world.pi.up_to(uin, device, lane)
                if up_to < last:
                    what = "not delivered" if last not in client.got[lane] else "not acknowledged"
                    found.append((what, f"user {uin} device {device} lane {lane}: {up_to} of {last}"))
                untold = set(range(1, up_to + 1)) - client.got[lane]
                if untold and not client.rogue:
                    found.append(("dropped without a word", f"user {uin} device {device} lane {lane}: {sorted(untold)[:5]}"))
        for relay in world.relays:
            core = relay.core
            assert core is not None
            if core.unsaved or core.waiting or core.busy:
                found.append(("busy", f"relay {relay.number}: {core.unsaved}, {core.waiting}, {core.busy}"))
            for session in core.sessions.values():
                if session.state is not State.SENDING:
                    found.append(("stuck", f"relay {relay.number}: {session.uin} {session.device} is {session.state.value}"))
        served = [device for relay in world.relays if relay.core is not None for device in relay.core.sessions]
        if sorted(served) != sorted(world.clients):
            found.append(("not served once", f"{sorted(served)}"))
        return found
