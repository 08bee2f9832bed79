"""A relay's wills: lost gateways, owners, devices that are back, and gateways that are asked to publish."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cluster.core.contract import TICK, SendControl, Settled
from cluster.wills.will import Phase, State, Will, WillMessage, decode, encode, state_of
from cluster.wire.v1 import control_pb2
from pixiu.errors import MalformedData
from pixiu.ids import EndpointID, gateway_msg_id, gateway_run
from pixiu.placement.partition import rendezvous
from relay.wills import core as wills
from relay.wills import events as ev

GATEWAY, OTHER_GATEWAY, PEER, ME = EndpointID(1), EndpointID(2), EndpointID(8), EndpointID(9)
GONE_S, NOW_MS = 10.0, 1_800_000_000_000
MINE = next(uin for uin in range(1, 100) if rendezvous(uin, (PEER, ME)) == ME)
THEIRS = next(uin for uin in range(1, 100) if rendezvous(uin, (PEER, ME)) == PEER)


def run_of(instance: int, generation: int = 1) -> int:
    return gateway_run(gateway_msg_id(instance, generation, 0))


def will_of(number: int, uin: int = MINE, delay_ms: int = 0) -> Will:
    return Will(gateway_msg_id(1, 1, number), uin, 5, delay_ms, WillMessage("gone", b"bye"))


class World:
    def __init__(self, owners: tuple[int, ...] = (ME,)) -> None:
        self.back: set[int] = set()
        """Users whose device is connected elsewhere."""
        self.core = wills.Core(
            endpoint=ME, gone_s=GONE_S, unix_ms=lambda: NOW_MS, is_back=lambda uin, device, run, over: uin in self.back
        )
        self.now, self.owners = 1.0, owners
        self.asked: list[tuple[int, Will, int]] = []
        """(gateway, will, SnowflakeID)."""
        self.told: list[tuple[int, State]] = []
        self.tokens: list[int] = []
        self.see({run_of(1): GATEWAY, run_of(2): OTHER_GATEWAY})

    def see(self, gateways: dict[int, EndpointID], owners: tuple[int, ...] | None = None) -> None:
        self.owners = self.owners if owners is None else owners
        self.do(ev.ClusterSeen(0, 1, self.owners, gateways, frozenset(gateways.values())))

    def do(self, event: ev.Event) -> None:
        for effect in self.core.step(event, self.now):
            control = control_pb2.Control.FromString(effect.messages[0])
            if control.HasField("publish_will"):
                state = decode(control.publish_will)
                assert state.will is not None
                self.asked.append((effect.peer, state.will, state.message_id))
            elif control.HasField("will_states"):
                self.told += [(effect.peer, decode(each)) for each in control.will_states.wills]
            if effect.token:
                self.tokens.append(effect.token)

    def hear(self, *states: State, peer: EndpointID = GATEWAY, run: int | None = run_of(1)) -> None:
        self.do(ev.WillsReceived(peer, run, list(states)))

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) <= end:
            self.now = max(deadline, self.now + 0.001)
            self.do(TICK)
        self.now = end

    def phases(self, told: Iterable[tuple[int, State]] | None = None) -> list[tuple[int, Phase]]:
        return [(peer, state.phase) for peer, state in (self.told if told is None else told)]


def test_the_owner_asks_the_gateway_that_had_the_connection_to_publish_then_others() -> None:
    world = World()
    will = will_of(1)
    world.hear(state_of(will, Phase.SET))
    world.hear(state_of(will, Phase.ENDED, message_id=44, whole=False))
    world.wait(0.1)
    assert world.asked == [(GATEWAY, will, 44)]
    world.wait(wills.ASK_S)
    assert world.asked[1:] == [(OTHER_GATEWAY, will, 44)]
    world.do(ev.WillPublished(will.id))
    world.wait(100.0)
    assert len(world.asked) == 2
    assert len(world.core) == 0
    assert world.core.bytes == 0


def test_who_does_not_own_the_user_waits_and_reminds_the_owner_of_what_is_overdue() -> None:
    world = World((PEER, ME))
    will = will_of(1, THEIRS)
    world.hear(state_of(will, Phase.SET))
    world.hear(state_of(will, Phase.ENDED, message_id=44, whole=False))
    world.wait(wills.OVERDUE_S - 0.1)
    assert world.asked == []
    assert world.told == []
    world.wait(0.2)
    assert world.told == [(PEER, State(will.id, THEIRS, 5, Phase.ENDED, 0, 0, 44, will.message))]
    world.hear(State(will.id, THEIRS, 5, Phase.GONE), peer=PEER, run=None)
    world.wait(100.0)
    assert len(world.told) == 1
    assert len(world.core) == 0


def test_the_next_owner_has_an_overdue_will_published() -> None:
    world = World((PEER, ME))
    will = will_of(1, THEIRS)
    world.hear(state_of(will, Phase.ENDED, message_id=44))
    world.wait(1.0)
    world.see({run_of(1): GATEWAY}, owners=(ME,))
    world.wait(wills.OVERDUE_S)
    assert world.asked[0] == (GATEWAY, will, 44)


def test_a_will_of_a_lost_gateway_is_published_when_its_run_is_over_for_certain() -> None:
    world = World()
    will = will_of(1)
    world.hear(state_of(will, Phase.SET))
    world.see({run_of(2): OTHER_GATEWAY})
    world.wait(GONE_S - 1.0)
    assert world.asked == []
    world.wait(2.0)
    assert world.asked[0] == (OTHER_GATEWAY, will, will.message_id(NOW_MS))


def test_a_gateway_that_is_back_in_time_keeps_its_wills() -> None:
    world = World()
    world.hear(state_of(will_of(1), Phase.SET))
    world.see({run_of(2): OTHER_GATEWAY})
    world.wait(GONE_S - 1.0)
    world.see({run_of(1): GATEWAY, run_of(2): OTHER_GATEWAY})
    world.wait(GONE_S * 3)
    assert world.asked == []
    assert len(world.core) == 1


def test_a_later_run_of_the_gateway_ends_the_wills_of_the_one_before_at_once() -> None:
    world = World()
    world.hear(state_of(will_of(1), Phase.SET))
    world.see({run_of(1, 2): GATEWAY, run_of(2): OTHER_GATEWAY})
    world.wait(0.1)
    assert len(world.asked) == 1


def test_the_owner_acts_for_a_lost_gateway_once_its_peers_know_the_message_id() -> None:
    world = World((PEER, ME))
    will = will_of(1)
    world.hear(state_of(will, Phase.SET))
    world.see({run_of(1, 2): GATEWAY})
    world.wait(0.1)
    assert world.phases() == [(PEER, Phase.ENDED)]
    assert world.asked == []
    world.do(Settled([(world.tokens[0], False)]))
    assert world.phases() == [(PEER, Phase.ENDED)] * 2
    assert world.asked == []
    world.do(Settled([(world.tokens[1], True)]))
    world.wait(0.01)
    assert world.asked == [(GATEWAY, will, will.message_id(NOW_MS))]


def test_peers_that_do_not_answer_are_not_waited_for_long() -> None:
    world = World((PEER, ME))
    world.hear(state_of(will_of(1), Phase.SET))
    world.see({run_of(1, 2): GATEWAY})
    world.wait(wills.AGREE_S + 0.1)
    assert len(world.asked) == 1


@pytest.mark.parametrize("ended", [True, False])
def test_a_delayed_will_is_dropped_when_the_device_comes_back_at_another_gateway(ended: bool) -> None:
    world = World((PEER, ME))
    will = will_of(1, delay_ms=5000)
    world.hear(state_of(will, Phase.SET))
    if ended:
        world.hear(state_of(will, Phase.ENDED, message_id=44, left_ms=5000, whole=False))
    world.do(ev.DeviceCame(MINE, 5, run_of(2), newest=True))
    if not ended:
        world.hear(state_of(will, Phase.ENDED, message_id=44, left_ms=5000, whole=False))
    world.wait(100.0)
    assert world.asked == []
    assert world.phases() == [(PEER, Phase.GONE)]
    assert world.core.counters.wills_client_back == 1


def test_a_delayed_will_is_dropped_when_the_device_is_there_at_the_time() -> None:
    world = World()
    world.back = {MINE}
    world.hear(state_of(will_of(1, delay_ms=5000), Phase.ENDED, message_id=44, left_ms=5000))
    world.hear(state_of(will_of(2), Phase.ENDED, message_id=45))
    world.wait(6.0)
    assert {will.id for _, will, _ in world.asked} == {will_of(2).id}


def test_a_late_report_of_a_will_that_is_over_changes_nothing_and_a_peer_is_told() -> None:
    world = World((PEER, ME))
    will = will_of(1)
    world.hear(State(will.id, MINE, 5, Phase.GONE))
    world.hear(state_of(will, Phase.SET))
    assert len(world.core) == 0
    assert world.told == []
    world.hear(state_of(will, Phase.ENDED, message_id=44), peer=PEER, run=None)
    assert world.phases() == [(PEER, Phase.GONE)]
    assert len(world.core) == 0


def test_a_gateway_speaks_of_the_wills_of_its_own_run_only() -> None:
    world = World()
    world.hear(state_of(will_of(1), Phase.SET), peer=OTHER_GATEWAY, run=run_of(2))
    assert len(world.core) == 0
    assert world.core.counters.wills_of_others == 1


def test_a_will_beyond_the_memory_for_wills_is_counted_and_not_kept() -> None:
    world = World()
    world.core.bytes = wills.MAX_BYTES
    world.hear(state_of(will_of(1), Phase.SET))
    assert len(world.core) == 0
    assert world.core.counters.wills_refused == 1


def test_what_nobody_publishes_is_given_up_and_counted() -> None:
    world = World()
    world.see({})
    world.hear(state_of(will_of(1), Phase.ENDED, message_id=44))
    world.wait(wills.KEPT_S + 5.0)
    assert len(world.core) == 0
    assert world.core.counters.wills_dropped == 1


@pytest.mark.parametrize(
    "change",
    [
        {"uin": 0}, {"id": 0}, {"id": 1 << 63}, {"device": 1 << 48}, {"phase": 7}, {"phase": 1},
        {"message": control_pb2.WillMessage(topic="")}, {"message": control_pb2.WillMessage(topic="t", qos=3)},
        {"message": control_pb2.WillMessage(topic="t" * 5000)},
        {"message": control_pb2.WillMessage(topic="t", payload=bytes(65537))},
        {"message": control_pb2.WillMessage(topic="t", extension=bytes(65536))},
    ],
)  # fmt: skip
def test_states_that_cannot_be_are_malformed(change: dict[str, object]) -> None:
    said = encode(state_of(will_of(1), Phase.SET))
    for name, value in change.items():
        if isinstance(value, control_pb2.WillMessage):
            said.message.CopyFrom(value)
        else:
            setattr(said, name, value)
    with pytest.raises(MalformedData):
        decode(said)


def test_effects_are_control_messages_alone() -> None:
    world = World((PEER, ME))
    world.hear(state_of(will_of(1), Phase.ENDED, message_id=44))
    world.now += 1.0
    assert all(isinstance(effect, SendControl) for effect in world.core.step(TICK, world.now))
