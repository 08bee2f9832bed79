"""A gateway's wills: what relays hear of them, and when this gateway publishes one itself."""

from __future__ import annotations

from cluster.core.contract import END_OF_TURN, TICK, SendControl, Settled
from cluster.wills.will import Phase, State, Will, WillMessage, decode, state_of
from cluster.wire.v1 import control_pb2
from gateway.events import EndWill, RelaysChanged, Replica, SetWill
from gateway.wills import core as wills
from gateway.wills import events as ev
from pixiu.ids import EndpointID, gateway_msg_id, gateway_run, snowflake_time_ms

RELAYS = (Replica(EndpointID(91), 0), Replica(EndpointID(92), 0))
UIN, DEVICE, NOW_MS = 7, 5, 1_800_000_000_000


class World:
    """A core, with relays that take everything unless `lost`."""

    def __init__(self, partitions: int = 1, relays: tuple[Replica, ...] = RELAYS) -> None:
        self.core = wills.Core(instance=3, generation=2, unix_ms=lambda: NOW_MS + round(self.now * 1000))
        self.now, self.lost = 1.0, False
        self.published: list[ev.PublishWill] = []
        self.told: list[tuple[int, State]] = []
        """(relay, state)."""
        self.answers: list[tuple[int, int]] = []
        """(relay, will that was published)."""
        self.do(RelaysChanged(partitions, relays))

    def do(self, event: ev.Event) -> None:
        effects = [*self.core.step(event, self.now), *self.core.step(END_OF_TURN, self.now)]
        settled: list[tuple[int, bool]] = []
        for effect in effects:
            if isinstance(effect, ev.PublishWill):
                self.published.append(effect)
                continue
            assert isinstance(effect, SendControl)
            control = control_pb2.Control.FromString(effect.messages[0])
            if control.HasField("will_published"):
                self.answers.append((effect.peer, control.will_published.id))
                continue
            settled.append((effect.token, not self.lost))
            if not self.lost:
                self.told += [(effect.peer, decode(state)) for state in control.will_states.wills]
        if settled:
            self.do(Settled(settled))

    def set(self, connection: int = 1, delay_ms: int = 0, uin: int = UIN) -> None:
        self.do(ev.DeviceOpened(connection, uin, DEVICE))
        self.do(SetWill(connection, uin, DEVICE, WillMessage("gone", b"bye"), delay_ms))

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) <= end:
            self.now = max(deadline, self.now + 0.001)
            self.do(TICK)
        self.now = end

    def phases(self, relay: int = 91) -> list[Phase]:
        return [state.phase for peer, state in self.told if peer == relay]


def test_every_relay_of_the_user_hears_of_a_will_with_its_message_once() -> None:
    world = World(2, (*RELAYS, Replica(EndpointID(93), 1)))
    world.set(uin=8)
    assert [(peer, state.phase, state.message) for peer, state in world.told] == [
        (91, Phase.SET, WillMessage("gone", b"bye")),
        (92, Phase.SET, WillMessage("gone", b"bye")),
    ]
    world.do(EndWill(1, True))
    assert [(peer, state.phase, state.message) for peer, state in world.told[2:]] == [
        (91, Phase.ENDED, None),
        (92, Phase.ENDED, None),
    ]


def test_a_relay_that_starts_later_hears_of_the_wills_of_connections_that_exist() -> None:
    world = World()
    world.set(1)
    world.set(2)
    world.told.clear()
    world.do(RelaysChanged(1, (RELAYS[0], Replica(EndpointID(99), 0))))
    assert [(peer, state.phase, state.message) for peer, state in world.told] == [
        (99, Phase.SET, WillMessage("gone", b"bye")),
        (99, Phase.SET, WillMessage("gone", b"bye")),
    ]


def test_what_is_lost_is_sent_again_in_its_newest_state() -> None:
    world = World()
    world.lost = True
    world.set()
    assert world.told == []
    world.do(EndWill(1, True))
    world.lost = False
    world.wait(1.0)
    assert world.phases() == [Phase.ENDED]
    assert world.told[0][1].message == WillMessage("gone", b"bye")


def test_a_will_that_its_client_takes_back_is_forgotten_everywhere() -> None:
    world = World()
    world.set()
    world.do(EndWill(1, False))
    assert world.phases() == [Phase.SET, Phase.GONE]
    assert len(world.core) == 0
    assert world.core.bytes == 0
    world.wait(100.0)
    assert world.published == []


def test_a_connection_without_a_will_leaves_none() -> None:
    world = World()
    world.do(ev.DeviceOpened(1, UIN, DEVICE))
    world.do(EndWill(1, True))
    world.wait(100.0)
    assert world.published == []
    assert world.told == []


def test_relays_have_a_will_published_and_this_gateway_only_where_none_took_it() -> None:
    world = World()
    world.set()
    world.do(EndWill(1, True))
    world.wait(100.0)
    assert world.published == []
    assert len(world.core) == 0

    world = World()
    world.set()
    world.lost = True
    world.do(EndWill(1, True))
    ended = world.now
    world.wait(wills.PATIENCE_S - 0.1)
    assert world.published == []
    world.wait(0.2)
    assert [effect.will.message for effect in world.published] == [WillMessage("gone", b"bye")]
    assert snowflake_time_ms(world.published[0].message_id) == NOW_MS + round(ended * 1000)


def test_a_cluster_without_relays_publishes_at_once_and_after_the_delay() -> None:
    world = World(0, ())
    world.set(1)
    world.set(2, 3000)
    world.do(EndWill(1, True))
    world.wait(0.01)
    assert len(world.published) == 1
    world.do(EndWill(2, True))
    world.wait(2.9)
    assert len(world.published) == 1
    world.wait(0.2)
    assert len(world.published) == 2
    for effect in world.published:
        world.do(ev.WillDone(effect.will.id))
    assert len(world.core) == 0
    assert world.core.unfinished == 0


def test_a_delayed_will_is_dropped_when_its_device_is_back() -> None:
    world = World()
    world.set(1, 3000)
    world.do(EndWill(1, True))
    world.do(ev.DeviceOpened(2, UIN, DEVICE))
    world.wait(100.0)
    assert world.phases() == [Phase.SET, Phase.ENDED, Phase.GONE]
    assert world.published == []
    assert world.core.counters.wills_client_back == 1


def test_a_connection_that_a_newer_one_of_its_device_replaces_leaves_no_delayed_will() -> None:
    world = World()
    world.set(1, 3000)
    world.set(2)
    world.do(EndWill(1, True))
    assert world.phases() == [Phase.SET, Phase.SET, Phase.GONE]


def test_a_relay_is_answered_when_the_will_that_it_asked_for_is_published() -> None:
    world = World()
    will = state_of(_will(), Phase.ENDED, message_id=77).will
    assert will is not None
    world.do(ev.WillAsked(EndpointID(91), will, 77))
    world.do(ev.WillAsked(EndpointID(92), will, 77))
    assert [effect.message_id for effect in world.published] == [77]
    world.do(ev.WillDone(will.id, again=True))
    world.wait(1.0)
    assert len(world.published) == 2
    assert world.answers == []
    world.do(ev.WillDone(will.id))
    assert world.answers == [(91, will.id), (92, will.id)]


def test_a_will_beyond_the_memory_for_wills_is_counted_and_not_kept() -> None:
    world = World()
    world.core.bytes = wills.MAX_BYTES
    world.set()
    assert world.core.counters.wills_refused == 1
    assert len(world.core) == 0


def _will() -> Will:
    return Will(gateway_msg_id(9, 1, 1), UIN, DEVICE, 0, WillMessage("gone", b"bye"))


def test_publishers_of_a_will_derive_one_id_and_wills_of_a_moment_have_different_ones() -> None:
    will, other = _will(), Will(gateway_msg_id(9, 1, 2), UIN, DEVICE, 0, WillMessage("gone", b"bye"))
    assert will.message_id(NOW_MS) == _will().message_id(NOW_MS) != other.message_id(NOW_MS)
    assert will.run == gateway_run(will.id)
