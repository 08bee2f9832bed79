"""The faults that a test can put back: each is a switch of `Variant`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import broker.core
import gateway.core
import proxy.core
import relay.core
import router.core
from cluster.core.contract import RecordsReceived, SendControl, Tick
from cluster.core.parcels import Target
from cluster.links.local import LocalPort, LocalSwitch
from cluster.links.peer.outbox import close
from cluster.membership.events import Effect, MessagesReceived, Replica
from cluster.membership.map.devices import Connection
from cluster.membership.map.lww_map import INSTANCE_SHIFT, Applied, Key, Purged
from cluster.membership.map.updates import Update
from cluster.membership.member.state import ClusterView, Speaker
from cluster.membership.replica.core import ReplicaCore
from cluster.membership.replica.forwards import Group
from gateway.confirming import Confirming
from gateway.delivery.dedupe import Dedupe
from pixiu.ids import EndpointID, gateway_instance
from pixiu.placement.partition import serves
from tests.sim.cluster.watched import Watched, WatchedDevices


@dataclass(frozen=True)
class Variant:
    """What is built into a cluster: the production cores, unless a test says otherwise."""

    membership: type[Watched] = Watched
    router: type[router.core.Core] = router.core.Core
    broker: type[broker.core.Core] = broker.core.Core
    gateway: type[gateway.core.Core] = gateway.core.Core
    proxy: type[proxy.core.Core] = proxy.core.Core
    relay: type[relay.core.Core] = relay.core.Core
    devices: type[WatchedDevices] = WatchedDevices
    digests: bool = True
    serve_before_snapshot: bool = False
    switch: type[LocalSwitch] = LocalSwitch
    """What joins the roles of a node."""
    keep_signals: bool = True
    """Whether a gateway's table of signals outlives it."""


class ForgetfulSwitch(LocalSwitch):
    """Fault: now and then what waits for a role of the same process is gone, and reported as handled."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = 0

    def _turn(self, port: LocalPort, now: float, most: int) -> int:
        self._turns += 1
        if self._turns % 20 == 0:
            for link in port.incoming.values():
                _, _, settlements, _, _ = link.boxes[0].take(1 << 20)
                for settlement in settlements:
                    close(settlement, True, link.settled)
                link.sender.report(link)
        return super()._turn(port, now, most)


class SilentSwitch(LocalSwitch):
    """Fault: roles of one process get no heartbeats from each other."""

    def _turn(self, port: LocalPort, now: float, most: int) -> int:
        port.beats.clear()
        return super()._turn(port, now, most)


class ByGateway(Watched):
    """Fault: a message applies when it is the newest of its gateway, as the seed has it."""

    def __init__(self, is_true: Callable[[Key, int], bool]) -> None:
        super().__init__(is_true)
        self._newest: dict[int, int] = {}

    def apply(self, batch: Iterable[Update], now: float) -> Applied:
        """In the order of the gateway's numbers only."""
        kept = []
        for change in batch:
            instance = change.id >> INSTANCE_SHIFT
            if change.id > self._newest.get(instance, 0):
                self._newest[instance] = change.id
                kept.append(change)
        return super().apply(kept, now)


class LastInLine(Confirming):
    """Fault: what is sent again leaves after what has come meanwhile."""

    def _take_back(self, number: int) -> None:
        for message in self._batches[number].messages:
            self._waiting[message.key].append(message)
        self._release(number)


class OvertakingGateway(gateway.core.Core):
    """A gateway with that fault."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.confirming = LastInLine(self._next_token, arguments["vrooms"], lambda: 0.0)
        self._handlers.clear()
        self._enter_events()


class WithoutTombstones(Watched):
    """Fault: a logout leaves nothing."""

    def _bury(self, key: Key, id_: int, now: float) -> None:
        return


class HastyFeedback(Watched):
    """Fault: negative feedback removes everybody on the gateway, also who came after it was said."""

    def absent(self, as_of: int, rooms: Iterable[int], now: float) -> Applied:
        """Without a look at the GatewayMsgIDs."""
        instance = gateway_instance(as_of)
        gone = []
        for room in rooms:
            for uin in list(self._of(room).get(instance, {})):
                self._remove(room, uin, instance)
                gone.append(Update(as_of, room, uin, False))
        return Applied(gone, list(rooms))


class BySnowflakeID(set[bytes]):
    """A set of identities that compares their first half."""

    def add(self, identity: bytes) -> None:
        """A message was seen."""
        super().add(identity[:8])

    def __contains__(self, identity: object) -> bool:
        return isinstance(identity, bytes) and super().__contains__(identity[:8])


class OneGeneration(Dedupe):
    """All that was ever seen, by its SnowflakeID."""

    def turn(self, now: float) -> None:
        """Forget nothing."""
        if not isinstance(self.current, BySnowflakeID):
            self.current = BySnowflakeID()


class DedupeBySnowflakeID(gateway.core.Core):
    """Fault: a big room's copies are told apart by their SnowflakeID alone, which all of them share."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dedupe = OneGeneration()


class DeafBroker(broker.core.Core):
    """Fault: records of a room that has moved are dropped, and nobody is told."""

    def _elsewhere(self, room: int) -> Target | None:
        return None

    def _notice(self, sender: EndpointID, now: float, out: list[Effect]) -> None:
        return


class SilentBroker(broker.core.Core):
    """Fault: records of a room that has moved are passed on, but a stale sender is not answered."""

    def _notice(self, sender: EndpointID, now: float, out: list[Effect]) -> None:
        return


class GreedyRouter(router.core.Core):
    """Fault: a stale sender's messages are confirmed, and not passed on."""

    def _pass_on(
        self, sender: EndpointID, messages: list[Update], view: ClusterView, group: Group, now: float, out: list[Effect]
    ) -> None:
        return


class TrustfulRouter(router.core.Core):
    """Fault: brokers that subscribed to a peer are left to it, and nobody waits until they know what is confirmed."""

    def _takers(self, origin: EndpointID, messages: list[Update], speaker: Speaker) -> dict[EndpointID, tuple[int, int]]:
        return super()._takers(origin, messages, Speaker.OTHER_PARTITION if speaker is Speaker.GATEWAY else speaker)


class EndlessRouter(router.core.Core):
    """Fault: what another partition's router sends is passed on as well, so that it comes back."""

    def _take(self, event: MessagesReceived, sender: Replica | None, now: float, out: list[Effect]) -> None:
        super()._take(event, sender, now, out)
        if self._view is not None and sender is not None:
            foreign = [m for m in event.messages if not serves(self.partition, m.group, self._view.partitions)]
            if foreign:
                self._pass_on(event.peer, foreign, self._view, Group(None, []), now, out)


class NewestByMessage(WatchedDevices):
    """Fault: of a device's connections the one with the highest GatewayMsgID is current, whose top bits are the gateway's
    instance, and not the one that connected last."""

    def entries(self, uin: int) -> list[Connection]:
        """The GatewayMsgID in the place of the connect time."""
        found = []
        for entry in super().entries(uin):
            register = self.get(uin, entry.key, entry.instance)
            assert register is not None
            found.append(entry._replace(connect_time=register[0]))
        return found

    def newer(self, change: Update) -> int:
        """As `Devices.newer`."""
        highest = max((rival.connect_time for rival in self.rivals(change)), default=0)
        return highest if highest > change.id else 0


class HastyRelay(relay.core.Core):
    """Fault: every login that is not the newest is ended, also one that has just come to a gateway whose clock is behind."""

    def _on_tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        self.contests.note(self.devices.take_together(), now - 60.0)
        super()._on_tick(event, now, out)


class MuteRelay(relay.core.Core):
    """Fault: messages to users who are offline are dropped without a word."""

    def _on_records(self, event: RecordsReceived, now: float, out: list[Effect]) -> None:
        """Without notices."""
        super()._on_records(event, now, out)
        out[:] = [effect for effect in out if not isinstance(effect, SendControl)]


class StaleLists(broker.core.Core):
    """Fault: where rooms' messages go through relays, a room's list of users is made once."""

    def _changed(self, outcome: Applied | Purged) -> None:
        return


class ForgetfulRelay(relay.core.Core):
    """Fault: a login that must go is told so once, and not when its gateway is within reach again."""

    def _on_tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        ReplicaCore._on_tick(self, event, now, out)


class QuietRelay(ForgetfulRelay):
    """Fault: nobody hears that a newer login takes the place of theirs."""

    def _replace(self, change: Update, out: list[Effect]) -> None:
        return
