"""What must hold, looked at whenever something happens.

A record's way is followed hop by hop, so that a loss has to be somebody's: a publisher's accepted record was handled by a
broker; a broker sends it to every gateway on which the cluster has known a member for a while; what a link lost it counted;
a gateway delivers what it got to everybody in the room, at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from broker.feeds import FeedState
from broker.multicast import AddressedFanout
from cluster.core.contract import SendControl, SendRecords
from cluster.links.api import PeerState
from cluster.links.datagrams.head import CONTROL, RECORDS, DatagramRefusal
from cluster.membership.events import Effect
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import Update
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID, gateway_instance
from pixiu.placement.big_rooms import vrooms_of
from pixiu.placement.partition import serves
from pixiu.wire.record import Flag, Kind
from pixiu.wire.uin_list import take_apart
from tests.sim.cluster.clients import ROOMS, USERS, Connection, Message
from tests.sim.cluster.edges import GatewayProcess
from tests.sim.cluster.registry import POLL_S
from tests.sim.cluster.stores import BrokerProcess, RelayProcess, RouterProcess

if TYPE_CHECKING:
    from tests.sim.cluster.process import Process
    from tests.sim.cluster.world import World

HARMLESS = {"duplicate", "old_counter", "unknown_sender", "destination", "sender", DatagramRefusal.LATE_FRAGMENT}
"""Why links refuse datagrams on a network that repeats, reorders and delays, and where processes follow each other at a port."""


def split(data: bytes) -> Iterator[bytes]:
    """Records laid end to end, each by itself."""
    position = 0
    while position < len(data):
        after = position + 4 + int.from_bytes(data[position : position + 4], "little")
        yield data[position:after]
        position = after


def records_of(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(kind, SnowflakeID, key) of records laid end to end."""
    for record in split(data):
        yield record[4], int.from_bytes(record[16:24], "little"), int.from_bytes(record[24:32], "little")


def users_of(record: bytes) -> tuple[int, ...]:
    """The users that an addressed record is for; none of another record."""
    found = take_apart(record, 0, len(record)) if record[4] == Kind.ADDRESSED else None
    return found[0] if found is not None else ()


class Watch:
    """See the module."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._said: dict[int, tuple[Update, float]] = {}
        """GatewayMsgID → what gateways said with it, and when first."""
        self.marks: dict[int, tuple[list[Update], float]] = {}
        """Request → marks that a router was asked for, and when."""
        self.logins: list[Update] = []
        self.messages: dict[int, Message] = {}
        self._handled: set[tuple[int, int]] = set()
        """(SnowflakeID, key) of what some broker handled."""
        self._arrived: dict[EndpointID, set[tuple[int, int]]] = {}
        self._expected: list[tuple[Connection, int, int, int]] = []
        """(connection, SnowflakeID, room, the join that makes it so)."""
        self._expected_signals: list[tuple[Connection, int, int, int | None]] = []
        """(connection, SnowflakeID, key, the join that makes it so, of a signal to a room)."""
        self._signals: set[tuple[str, int, int]] = set()
        """(gateway's place, UIN, SnowflakeID) of delivered signals."""
        self._delivered_signals: set[int] = set()
        self._given: set[tuple[str, int, int]] = set()
        """(gateway's place, SnowflakeID, key) of signals that came while somebody there was to get them."""
        self._offline: set[int] = set()
        """SnowflakeIDs of what relays said that nobody takes."""
        self._noticed: dict[tuple[EndpointID, EndpointID], float] = {}
        self.checked: Counter[str] = Counter()

    # --- membership

    def joined(self, room: int, uin: int, id_: int) -> None:
        """Somebody joined: an old login for a map to be haunted by."""
        self.logins.append(Update(id_, self._world.vrooms.room_of_user(room, uin), uin, True))

    def say(self, messages: Iterable[Update]) -> None:
        """A gateway says something, or says it again."""
        for message in messages:
            self._said.setdefault(message.id, (message, self._world.now))

    def confirmations(self, process: RouterProcess, messages: Iterable[bytes]) -> None:
        """At the moment of a confirmation every broker that is subscribed here has the change, or a newer one of the key, and so
        have those that are subscribed to a peer and were not dead here since it was said; what is not for this router's partition
        is with a router that serves it."""
        ids = [i for data in messages for i in control_pb2.Control.FromString(data).gateway_confirm.ids]
        for change, said_at in [self._said[i] for i in ids]:
            if serves(process.core.partition, change.group, process.view.count("router")):
                for target in self._world.running(BrokerProcess):
                    self._confirmed_at(process, target, change, said_at)
            else:
                self._passed_on(process, change)

    def marks_confirmed(self, process: RouterProcess, request: int) -> None:
        """The same of marks of rooms."""
        changes, said_at = self.marks.pop(request)
        for change in changes:
            if serves(process.core.partition, change.group, process.view.count("router")):
                for target in self._world.running(BrokerProcess):
                    self._confirmed_at(process, target, change, said_at)
        self.checked["marks"] += len(changes)

    def _confirmed_at(self, process: RouterProcess, target: BrokerProcess, change: Update, said_at: float) -> None:
        feed = target.core.feeds.get(process.core.partition)
        if feed is None or not serves(target.core.partition, change.group, target.view.count("broker")):
            return
        if feed.source == process.endpoint:
            told = feed.state is FeedState.LIVE and target.endpoint in process.core.subscribers
        else:
            told = self._knows(process, target, said_at) and serves(
                target.core.partition, change.group, process.view.count("broker")
            )
        if told:
            known = target.core.membership.get(change.group, change.member, gateway_instance(change.id))
            old = change.id < target.core.membership.floor(gateway_instance(change.id))
            old = old or (target.endpoint, change.group, change.member) in self._world.scrambled
            assert old or (known is not None and known[0] >= change.id), "a broker does not know a confirmed change"
            self.checked["confirmations" if feed.source == process.endpoint else "confirmations of a peer's"] += 1

    @staticmethod
    def _knows(process: RouterProcess, target: BrokerProcess, since: float) -> bool:
        """Whether a router knows a broker, and it was not dead there."""
        known = any(node.endpoint == target.endpoint for node in process.view.of_role("broker"))
        alive = process.links.state(target.endpoint) is not PeerState.DEAD
        return known and alive and process.revived.get(target.endpoint, 0.0) <= since

    def _passed_on(self, process: RouterProcess, change: Update) -> None:
        partition = change.group % process.view.count("router")
        mine = process.core.membership.get(change.group, change.member, gateway_instance(change.id))
        if mine is not None and mine[0] >= change.id:
            return  # it came just before the layout changed, and was this router's own then
        for other in self._world.alive(RouterProcess):
            known = other.core.membership.get(change.group, change.member, gateway_instance(change.id))
            floor = other.core.membership.floor(gateway_instance(change.id))
            if other.core.partition == partition and (other.core.queued or change.id < floor or (known and known[0] >= change.id)):
                self.checked["passed on"] += 1
                return
        raise AssertionError("a stale sender's message was confirmed that no replica of its partition has")

    # --- records

    def accepted(self, message: Message) -> None:
        """A publisher was told that its message is with a broker."""
        big = message.kind is Kind.ROOM and self._world.vrooms.is_big(message.room)
        keys = vrooms_of(message.room) if big else [message.room]
        assert all((message.id, key) in self._handled for key in keys), "a message was accepted that nobody has handled"
        self.checked["accepted chat" if message.kind is Kind.CHAT else "accepted big" if big else "accepted"] += 1

    def unserved(self, message: Message) -> None:
        """A publisher was told that nobody serves the room or user: not because the layout counts partitions that never ran."""
        role = "relay" if message.to_user else "broker"
        self._has_run(role, message.room % self._world.registry.view.count(role))
        self.checked["unserved"] += 1

    def _has_run(self, role: str, partition: int) -> None:
        """A partition that nobody serves now is one that was served."""
        should = [place for place in self._world.places_of(role) if place.partition == partition]
        assert any(place.runs > 1 or place.has_run or not place.is_up for place in should), (
            f"the layout counts {role}s that never ran"
        )

    def handled(self, process: BrokerProcess, peer: EndpointID, data: bytes, effects: list[Effect]) -> None:
        """A broker got records, and sends this."""
        for effect in effects:
            if isinstance(effect, SendControl):
                self._noticed[process.endpoint, effect.peer] = self._world.now
        sent, lists = _copies(effects)
        here = Counter((id_, key) for _, id_, key in records_of(data))
        for id_, key in here:
            targets, listed = sent.get((id_, key), []), lists.get((id_, key), [])
            served = serves(process.core.partition, key, process.view.count("broker"))
            held = not targets and isinstance(process.core.fanout, AddressedFanout) and process.core.fanout.waits(key)
            if served or targets or held:  # what is held of a room that has moved is passed on behind what it waits for
                self._handled.add((id_, key))
            if held:
                self.checked["held"] += 1
                continue
            # Copies of one signal may come together.
            assert len(targets) == len(set(targets)) * here[id_, key], "a broker sends a gateway or relay two copies of a record"
            uins = [uin for _, uin in listed]
            assert len(uins) == len(set(uins)) * here[id_, key], "a broker lists a user twice"
            if served and self._world.shape.through_relays:
                self._listed_everywhere(process, key, listed)
            elif served:
                self._sent_everywhere(process, key, targets)
            else:
                self._stale(process, peer, key, targets)

    def released(self, process: BrokerProcess, effects: list[Effect]) -> None:
        """What a broker kept back leaves."""
        _, lists = _copies(effects)
        for (_, key), listed in lists.items():
            # What a gateway sent again may have been kept back twice.
            assert len(set(Counter(uin for _, uin in listed).values())) <= 1, "a broker lists a user twice"
            if serves(process.core.partition, key, process.view.count("broker")):
                self._listed_everywhere(process, key, listed)
                self.checked["released"] += 1

    def _stale(self, process: BrokerProcess, peer: EndpointID, key: int, targets: list[EndpointID]) -> None:
        """The sender's layout is old: for two poll intervals the record is passed on, and the sender is told."""
        now, view = self._world.now, process.view
        others = [n for n in view.running("broker") if n.partition == key % view.count("broker")]
        reachable = [n.endpoint for n in others if process.links.state(n.endpoint) is not PeerState.DEAD]
        if now >= process.layout_at + 2 * POLL_S or not reachable:
            return
        assert targets, "a broker dropped a record whose room has moved to another broker"
        assert now - self._noticed.get((process.endpoint, peer), -9.0) < 1.1, "a broker did not answer a stale sender"
        self.checked["stale"] += 1

    def _well_fed(self, process: BrokerProcess, key: int) -> bool:
        """Whether nothing has happened to a broker and the routers of a room for a while."""
        world = self._world
        partitions = world.registry.view.count("router")
        fed = [place for place in world.places_of("router") if serves(place.partition, key, partitions)]
        return world.is_quiet(process.place, *fed)

    def _listed_everywhere(self, process: BrokerProcess, key: int, listed: list[tuple[EndpointID, int]]) -> None:
        """Through relays: each member is listed for a relay of theirs, wherever they are connected."""
        world, view = self._world, process.view
        if not self._well_fed(process, key):
            return
        relays = [n for n in view.running("relay") if process.links.state(n.endpoint) is not PeerState.DEAD]
        for target in world.running(GatewayProcess):
            for connection in world.clients.on_gateway(target, key) if world.is_quiet(target.place) else ():
                since = connection.known.get(world.vrooms.shown(key), world.now)
                ways = [(n.endpoint, connection.uin) for n in relays if n.partition == connection.uin % view.count("relay")]
                if ways and since + world.recovery_s <= world.now:
                    assert set(ways) & set(listed), f"a broker listed no relay for somebody who has long been in {key}"
                    self.checked["listed"] += 1

    def _sent_everywhere(self, process: BrokerProcess, key: int, targets: list[EndpointID]) -> None:
        world = self._world
        if not self._well_fed(process, key):
            return
        for target in world.running(GatewayProcess):
            found = self._world.clients.on_gateway(target, key)
            since = min((c.known.get(world.vrooms.shown(key), world.now) for c in found), default=world.now)
            if since + world.recovery_s <= world.now and world.is_quiet(target.place):
                assert target.endpoint in targets, f"a broker left out a gateway that has long had a member of {key}"
                self.checked["sent"] += 1

    def relayed(self, process: RelayProcess, data: bytes, effects: list[Effect]) -> None:
        """A relay got records, and sends this: to where a user is, from the moment at which the user was told so."""
        sent: dict[tuple[int, int], list[EndpointID]] = {}
        noticed: Counter[int] = Counter()
        for effect in effects:
            if isinstance(effect, SendRecords):
                for _, id_, key in records_of(b"".join(effect.records)):
                    sent.setdefault((id_, key), []).append(effect.peer)
            elif isinstance(effect, SendControl):
                noticed.update(offline_of(effect.messages))
        self._offline.update(noticed)
        lost: Counter[int] = Counter()
        for record, (kind, id_, key) in zip(split(data), records_of(data), strict=True):
            targets = sent.get((id_, key), [])
            if kind == Kind.ADDRESSED:
                for uin in users_of(record):
                    self._relayed_to(process, uin, targets, self._world.vrooms.shown(key))
                continue
            served = serves(process.core.partition, key, process.view.count("relay"))
            if served or targets:
                self._handled.add((id_, key))
            lost[id_] += served and not targets
            self._relayed_to(process, key, targets, None)
        assert +lost == noticed, "a relay drops messages to users, and does not say which"

    def _relayed_to(self, process: RelayProcess, uin: int, targets: list[EndpointID], room: int | None) -> None:
        """A relay has a message for a user, or for those who are in a room."""
        world = self._world
        count = world.registry.view.count("relay")
        fed = [place for place in world.places_of("relay") if serves(place.partition, uin, count)]
        if not serves(process.core.partition, uin, process.view.count("relay")) or process.view.count("relay") != count:
            return
        if world.is_quiet(*fed, *world.places_of("gateway")):
            for here in [user.connection for user in world.clients.users if user.uin == uin]:
                if here is not None and (here.online if room is None else room in here.known):
                    assert here.gateway.endpoint in targets, "a relay left out the gateway where a user is"
                    self.checked["chat sent" if room is None else "room sent"] += 1

    def arrived(self, process: GatewayProcess, data: bytes) -> None:
        """A gateway got records: at the turn's end everybody in their rooms has them."""
        seen = self._arrived.setdefault(process.endpoint, set())
        for record, (kind, id_, key) in zip(split(data), records_of(data), strict=True):
            if kind == Kind.SIGNAL:
                self._signal_arrived(process, id_, key, to_room=bool(record[5] & Flag.TO_ROOM))
            elif kind == Kind.ROOM and (id_, key) not in seen:
                seen.add((id_, key))
                shown = self._world.vrooms.shown(key)
                self._expected += [(c, id_, shown, c.rooms[shown]) for c in self._world.clients.on_gateway(process, key)]

    def _signal_arrived(self, process: GatewayProcess, id_: int, key: int, *, to_room: bool) -> None:
        """The first copy for which there is somebody is for everybody who is there then."""
        clients = self._world.clients
        found = clients.on_gateway(process, key) if to_room else clients.to_user(process, key)
        if found and (process.place.name, id_, key) not in self._given:
            self._given.add((process.place.name, id_, key))
            shown = self._world.vrooms.shown(key) if to_room else key
            self._expected_signals += [(c, id_, shown, c.rooms[shown] if to_room else None) for c in found]

    def turn_ended(self, process: GatewayProcess) -> None:
        """Look at what `arrived` noted, and at what this gateway can tell nobody: that is so where replicas are gone."""
        for role, reporter in (("router", process.core.rooms), ("relay", process.core.users)):
            for partition in reporter.stranded:
                self._has_run(role, partition)
                self.checked["stranded"] += 1
        for connection, id_, key, joined in self._expected_signals:
            left = connection.number not in self._world.clients.connections
            left = left or (joined is not None and connection.rooms.get(key) != joined)
            assert left or id_ in connection.seen, "a gateway did not deliver a signal that it got"
            self.checked["signals given"] += 1
        self._expected_signals.clear()
        for connection, id_, room, join in self._expected:
            left = connection.number not in self._world.clients.connections or connection.rooms.get(room) != join
            assert left or id_ in connection.seen, "a gateway did not deliver what it got to somebody in the room"
            self.checked["delivered"] += 1
        self._expected.clear()

    def delivered(self, process: GatewayProcess, connections: tuple[int, ...], data: bytes, count: int) -> None:
        """A gateway writes records to its clients."""
        found = list(records_of(data))
        assert len(found) == count
        written: set[tuple[str, int, int]] = set()
        for number in connections:
            connection = self._world.clients.connections.get(number)
            assert connection is not None, "a gateway writes to a connection that is closed"
            assert connection.gateway is process
            for kind, id_, room in found:
                self._received(connection, kind, self.messages[id_], room)
                if kind == Kind.SIGNAL:
                    written.add((process.place.name, connection.uin, id_))
        # A user who has two connections here gets it on both, at once.
        self._signals |= written

    def _received(self, connection: Connection, kind: int, message: Message, room: int) -> None:
        assert (kind, room) == (message.kind, message.room), "a message changed on its way"
        if message.to_user:
            assert room == connection.uin, "somebody got another user's message"
            assert connection.takes_own, "somebody got a user's messages who did not ask for them"
            self.checked["chat" if kind == Kind.CHAT else "user signals"] += 1
        else:
            assert room in connection.rooms, "somebody got a message of a room that they are not in"
        if kind == Kind.SIGNAL:
            once = (connection.gateway.place.name, connection.uin, message.id)
            assert once not in self._signals, "a signal was delivered twice"
            assert message.id not in connection.seen, "a signal was delivered twice at once"
            connection.seen.add(message.id)
            self._delivered_signals.add(message.id)
            self.checked["signals"] += 1
            self.checked["signals to a big room"] += self._world.vrooms.is_big(room) and not message.to_user
            return
        assert message.id not in connection.seen, "a message was delivered twice"
        connection.seen.add(message.id)
        before = connection.last.get((message.session, kind, room))
        if before is not None and before.number > message.number:
            assert not self._keeps_order(message), "a sender's messages to a room came out of order"
            return
        connection.last[message.session, kind, room] = message
        self.checked["in order"] += not self._world.wire.reorder

    def _keeps_order(self, message: Message) -> bool:
        """Through relays of several partitions a gateway gets several copies, and gives out the first that comes; and whose
        relays change, gets a room's messages by another one."""
        world = self._world
        if not world.keeps_order(message.sent_at) or message.to_user or not world.shape.through_relays:
            return world.keeps_order(message.sent_at)
        relays = world.places_of("relay")
        return all(place.partition == 0 for place in relays) and world.is_quiet(*relays, *world.places_of("broker"))

    def offline(self, id_: int) -> None:
        """A sender was told that the user is offline."""
        assert id_ in self._offline, "somebody is called offline of whom no relay said so"
        self.checked["offline"] += 1

    def receipt(self, id_: int) -> None:
        """A sender was told that its signal is delivered."""
        assert id_ in self._delivered_signals, "a receipt for what was not delivered"
        self.checked["receipts"] += 1

    # --- at the end

    def differences(self) -> list[str]:
        """What is not as it must be five heartbeats after the last fault."""
        clients = self._world.clients
        found = [
            *self.maps(),
            *self._unconfirmed(),
            *self._gaps(),
            *self._handed_over(),
            *clients.logins.differences(list(clients.connections.values())),
        ]
        for process in self._world.processes():
            if process.state != "Running":
                found.append(f"{process.place.name} does not run")
            counts = Counter({reason: n for reason, n in process.links.refusals.counts.items() if reason not in HARMLESS})
            refused = dict(counts - Counter({DatagramRefusal.NOT_TAKEN: process.of_strangers}))
            if refused:
                found.append(f"{process.place.name} refused {refused}")
        if self._world.clients.unresolved:
            found.append(f"{self._world.clients.unresolved} publishers' messages and signals have no outcome")
        if self._world.clients.unanswered:
            found.append(f"{self._world.clients.unanswered} joins have no answer")
        return found

    def maps(self) -> Iterator[str]:
        """Where routers, brokers and relays differ from what is on the gateways."""
        view = self._world.registry.view
        everything = {e for g in self._world.alive(GatewayProcess) for e in entries(g.core.rooms.own, self._rooms())}
        held: list[tuple[Process, LwwMap, int]] = [
            *((r, r.core.membership, view.count("router")) for r in self._world.alive(RouterProcess)),
            *((b, b.core.membership, view.count("broker")) for b in self._world.alive(BrokerProcess)),
        ]
        users = range(USERS + 1)
        devices = {e for g in self._world.alive(GatewayProcess) for e in entries(g.core.users.own, users)}
        held += [(r, r.core.devices, view.count("relay")) for r in self._world.alive(RelayProcess)]
        for process, membership, partitions in held:
            known, keys = (devices, users) if isinstance(process, RelayProcess) else (everything, self._rooms())
            truth = {e for e in known if serves(process.place.partition, e[1], partitions)}
            mine = set(entries(membership, keys))
            if truth != mine:
                yield f"{process.place.name} lacks {sorted(truth - mine)}, has too much {sorted(mine - truth)}"

    def _unconfirmed(self) -> Iterator[str]:
        for process in self._world.alive(GatewayProcess):
            if process.core.unconfirmed:
                yield f"{process.place.name} waits for {process.core.unconfirmed} confirmations"

    def _rooms(self) -> list[int]:
        big = range(self._world.vrooms.low, self._world.vrooms.high)
        return [*range(1, ROOMS + 1), *(v for room in big for v in vrooms_of(room))]

    def _gaps(self) -> list[str]:
        """Items that the network lost on the way between two live processes are those that the receiver counts as missing."""
        found: list[str] = []
        for process in self._world.processes():
            for other in self._world.processes():
                link = process.links._links.get(other.endpoint)
                if link is None or other is process:
                    continue
                for type_, tracker in ((int(RECORDS), link.receivers[0].records), (int(CONTROL), link.receivers[0].control)):
                    lost = self._world.wire.missing[other.endpoint, process.endpoint, type_]
                    self.checked["gaps"] += lost
                    untaken = process.untaken[other.endpoint] if type_ == CONTROL else 0
                    untaken += process.links.refusals.counts.get(DatagramRefusal.LATE_FRAGMENT, 0)
                    if not lost <= tracker.lost <= lost + untaken:
                        text = f"counts {tracker.lost} lost items of type {type_} from {other.place.name}, it was {lost}"
                        found.append(f"{process.place.name} {text}")
        return found

    def _handed_over(self) -> Iterator[str]:
        """Roles of one process get all that others of it send, and every parcel has its outcome."""
        for process in self._world.processes():
            for place in process.place.node.places:
                other = place.process
                if other is None or other is process or not other.alive:
                    continue
                sent, got = other.links.port.counts_of(process.endpoint), process.links.port.counts_of(other.endpoint)
                self.checked["handed over"] += got.records_received + got.control_received
                missing = sent.records_sent - got.records_received, sent.control_sent - got.control_received, sent.queue_drops
                if missing != (0, process.untaken[other.endpoint], 0):
                    yield f"{process.place.name} lacks {missing} of what {other.place.name} of its process sent"
            if process.place.node.switch.waits() or process.links.port.queued:
                yield f"something waits for a turn of {process.place.name}"


def offline_of(messages: Iterable[bytes]) -> list[int]:
    """The SnowflakeIDs that a relay's controls name as taken by nobody."""
    return [i for data in messages for i in control_pb2.Control.FromString(data).chat_offline.snowflake_ids]


def entries(membership: LwwMap, rooms: Iterable[int]) -> list[tuple[int, int, int, int]]:
    """(GatewayMsgID, room, UIN, value) of all that is live."""
    found: list[tuple[int, int, int, int]] = []
    for room in rooms:
        for key in membership.live_keys(room):
            value = membership.get(*key)
            assert value is not None
            found.append((value[0], key.group, key.member, membership.value(*key)))
    return sorted(found)


def _copies(
    effects: list[Effect],
) -> tuple[dict[tuple[int, int], list[EndpointID]], dict[tuple[int, int], list[tuple[EndpointID, int]]]]:
    """Of each record that is sent, by ID and key: to whom, and for which users by which relay."""
    sent: dict[tuple[int, int], list[EndpointID]] = {}
    lists: dict[tuple[int, int], list[tuple[EndpointID, int]]] = {}
    for effect in effects:
        if isinstance(effect, SendRecords):
            for record, (_, id_, key) in zip(effect.records, records_of(b"".join(effect.records)), strict=True):
                sent.setdefault((id_, key), []).append(effect.peer)
                lists.setdefault((id_, key), []).extend((effect.peer, uin) for uin in users_of(record))
    return sent, lists
