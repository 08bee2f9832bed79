"""What a relay decides about mail beside its deliveries: whom it looks at and when, what it asks which partition of Pi."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest

from cluster.core.contract import END_OF_TURN, TICK
from cluster.membership.map.devices import connected, device_key
from cluster.membership.map.updates import Update
from pixiu.ids import EndpointID, gateway_msg_id
from pixiu.wire.envelope import encode as deliver
from pixiu.wire.inbox_operations import encode_acknowledges, encode_add_device, encode_opens
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import pi_pb2
from relay.delivery import events as dv
from relay.delivery.limits import Limits
from relay.delivery.sessions import Deliveries
from relay.mail import core as mail_core
from relay.mail import events as ev
from relay.mail.core import HEARTBEAT_S, SETTLE_S, WALK_PAUSE_S, MailCore
from relay.mail.devices import MailDevices, TrackedDevices

RELAY, OTHER, GATEWAY, INSTANCE = EndpointID(900), EndpointID(901), EndpointID(101), 1
DEVICE = 70
Kept = TypeVar("Kept")


def numbers(*uins: int) -> bytes:
    """Asks for their devices' numbers."""
    return b"".join(encode_add_device(uin, DEVICE) for uin in uins)


def opens(*uins: int) -> bytes:
    """Asks for sessions of their devices."""
    return encode_opens((uin, 1) for uin in uins)


def saves(*uins: int) -> bytes:
    """Says that their devices have one mail."""
    return encode_acknowledges((uin, 1, 5, 1, 1, 0) for uin in uins)


def done(operations: bytes) -> list[int]:
    """What Pi answers: number 1 for a device, session 5, and that a cursor is saved."""
    for made, result in ((numbers, 1), (opens, 5), (saves, 0)):
        for count in range(1, 5):
            if len(made(*range(count))) == len(operations) and made(1)[0] == operations[0]:
                return [result] * count
    return []


class Relay:
    """A core, and what it asked for since it was last looked at. Pi numbers every device 1, and opens session 5."""

    def __init__(self, pis: int = 1, *, owners: Sequence[int] = (RELAY,), ready: bool = True) -> None:
        self.now = 100.0
        self.effects: list[ev.Effect] = []
        self._changes = 0
        self.reachable = True
        self.data = TrackedDevices(lambda: None)
        devices = MailDevices(self.data, lambda _: GATEWAY if self.reachable else None, RELAY)
        self.core = MailCore(devices, Deliveries(devices.owns, Limits()))
        self.cluster(pis=pis, owners=owners)
        if ready:
            self.step(dv.StreamReady(GATEWAY))

    @property
    def sessions(self) -> set[int]:
        """Users who are served."""
        return {device.uin for device in self.core.deliveries.sessions}

    def step(self, event: ev.Event) -> None:
        """An event, and the end of its turn."""
        self.effects += self.core.step(event, self.now)
        self.effects += self.core.step(END_OF_TURN, self.now)

    def cluster(
        self, *, pis: int = 1, xius: int = 1, owners: Sequence[int] = (RELAY,), gateways: Sequence[int] = (GATEWAY,)
    ) -> None:
        """Who runs."""
        self.reachable = bool(gateways)
        self.step(ev.ClusterChanged(owners, 0, 1, frozenset(gateways), pis, xius))

    def take(self, kind: type[Kept]) -> list[Kept]:
        """Effects of a kind since the last time."""
        found: list[Kept] = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, kind)]
        return found

    def login(self, *uins: int, at: int = 5) -> None:
        """A device of each takes mail."""
        for uin in uins:
            self._changes += 1
            id_ = gateway_msg_id(INSTANCE, 1, self._changes)
            self.data.apply([connected(id_, uin, device_key(DEVICE, 0), at, chat=True, mail=True)], self.now)
        self.effects += self.core.step(END_OF_TURN, self.now)

    def logout(self, uin: int) -> None:
        """It goes."""
        self._changes += 1
        self.data.apply([Update(gateway_msg_id(INSTANCE, 1, self._changes), uin, device_key(DEVICE, 0), False)], self.now)
        self.effects += self.core.step(END_OF_TURN, self.now)

    def answer(self, asked: ev.AskPi, *results: int) -> None:
        """Pi answers; without results it does not."""
        self.step(ev.PiAnswered(asked.number, pi_pb2.PiReply(results=results) if results else None))

    def serve(self) -> None:
        """Pi answers everything until nothing is asked: empty inboxes."""
        while asked := self.take(ev.AskPi):
            for each in asked:
                reply = pi_pb2.PiReply(reads=[pi_pb2.PiReadReply() for _ in each.reads], results=done(each.operations))
                self.step(ev.PiAnswered(each.number, reply))

    def tick(self) -> float:
        """Time passes until the next deadline; returns how much."""
        before, self.now = self.now, max(self.core.next_deadline(), self.now)
        self.step(TICK)
        return self.now - before


def mail(uin: int, seq: int) -> dv.Notice:
    """An inbox has one more."""
    return dv.Notice(uin, 1, seq, [seq], [encode(Kind.MAIL, uin, b"m", seq, type=64)])


def test_pi_is_asked_once_a_partition_for_what_one_turn_brings() -> None:
    relay = Relay(pis=2)
    relay.login(2, 3, 4, 5)
    asked = relay.take(ev.AskPi)
    assert [(each.partition, each.operations) for each in asked] == [(0, numbers(2, 4)), (1, numbers(3, 5))]
    relay.answer(asked[0], 1, 1)
    assert relay.sessions == {2, 4}, "one partition does not wait for the other"
    (opened,) = relay.take(ev.AskPi)
    assert (opened.partition, opened.operations) == (0, opens(2, 4))
    relay.answer(opened, 5, 6)
    (reads,) = relay.take(ev.AskPi)
    assert {(read.uin, read.session) for read in reads.reads} == {(2, 5), (4, 6)}


def acknowledged_by_two_partitions() -> tuple[Relay, list[ev.AskPi]]:
    """Two users' devices have got a mail each; Pi is asked to save the cursors."""
    relay = Relay(pis=2)
    relay.login(2, 3)
    relay.serve()
    relay.step(dv.Notified(1, 1, [mail(2, 1), mail(3, 1)]))
    (sent,) = relay.take(dv.Deliver)
    assert sent.chunks == [dv.Chunk(uin, 1, 1, deliver(1, 1, uin, 5, 1, 1, 0, mail(uin, 1).records[0])) for uin in (2, 3)]
    relay.step(dv.Acknowledged(GATEWAY, [dv.Acknowledgement(uin, 1, 5, 1, 1, 0) for uin in (2, 3)]))
    relay.tick()
    asked = relay.take(ev.AskPi)
    assert [(each.partition, each.operations) for each in asked] == [(0, saves(2)), (1, saves(3))]
    return relay, asked


def test_cursors_are_saved_when_every_partition_has_answered() -> None:
    relay, (first, second) = acknowledged_by_two_partitions()
    relay.answer(second, 0)
    assert relay.core.deliveries.unsaved == 2
    relay.answer(first, 0)
    assert relay.core.deliveries.unsaved == 0


def test_a_partition_that_does_not_answer_has_its_cursors_alone_saved_again() -> None:
    relay, (first, second) = acknowledged_by_two_partitions()
    relay.answer(second)
    relay.answer(first, 0)
    assert relay.core.deliveries.unsaved == 1
    relay.tick()
    (again,) = relay.take(ev.AskPi)
    assert (again.partition, again.operations) == (1, saves(3))


def test_an_answer_counts_once_and_a_strange_one_is_dropped() -> None:
    relay, (first, second) = acknowledged_by_two_partitions()
    relay.answer(first, 0)
    relay.answer(first, 0)
    relay.step(ev.PiAnswered(12_345, None))
    assert relay.core.deliveries.unsaved == 2
    relay.answer(second, 0)
    assert relay.core.deliveries.unsaved == 0


@pytest.mark.parametrize("change", [{"pis": 0}, {"xius": 0}, {"owners": ()}, {"owners": (OTHER,)}])
def test_without_stores_or_not_being_an_owner_nobody_is_served(change: dict[str, int]) -> None:
    relay = Relay()
    relay.login(2)
    relay.serve()
    assert relay.sessions == {2}
    relay.cluster(**change)  # type: ignore[arg-type]
    assert relay.sessions == set()
    assert relay.take(ev.ConnectPis)[-1].partitions == (1 if "owners" in change else 0)


def test_users_of_a_gateway_that_is_out_of_reach_are_logged_out_and_found_again() -> None:
    relay = Relay()
    relay.login(2)
    relay.serve()
    relay.cluster(gateways=())
    assert relay.sessions == set()
    relay.cluster()
    relay.serve()
    assert relay.sessions == {2}


@pytest.mark.parametrize("settled", [False, True])
def test_a_login_while_owners_settle_is_read_for_once_more(settled: bool) -> None:
    relay = Relay(owners=())
    relay.cluster()
    relay.now += SETTLE_S * settled
    relay.login(2)
    relay.serve()
    (session,) = relay.core.deliveries.sessions.values()
    assert (session.deadline == relay.now + Limits().settle_s) is not settled


def test_a_gateway_without_a_stream_gets_one_and_nothing_before_it_is_ready() -> None:
    relay = Relay(ready=False)
    relay.login(2)
    relay.serve()
    assert [list(each.gateways) for each in relay.take(ev.OpenStreams)] == [[GATEWAY]]
    relay.step(dv.Notified(1, 1, [mail(2, 1)]))
    assert not relay.take(dv.Deliver)
    assert [each.number for each in relay.take(dv.ConfirmNotices)] == [1]
    relay.step(dv.StreamReady(GATEWAY))
    (read,) = relay.take(ev.AskPi)
    assert {each.lane for each in read.reads} == {1}
    relay.step(dv.StreamBroken(GATEWAY))
    relay.login(3)
    relay.serve()
    assert [list(each.gateways) for each in relay.take(ev.OpenStreams)] == [[GATEWAY]]


def test_what_went_by_an_older_stream_is_sent_again_by_a_new_one() -> None:
    relay = Relay()
    relay.login(2)
    relay.serve()
    relay.step(dv.Notified(1, 1, [mail(2, 1)]))
    assert len(relay.take(dv.Deliver)) == 1
    relay.step(dv.StreamReady(GATEWAY))
    (read,) = relay.take(ev.AskPi)
    assert [each.start for each in read.reads] == [0]


def test_everybody_is_looked_at_in_parts_and_streams_that_nobody_needs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_core, "WALK_USERS", 2)
    relay = Relay()
    relay.login(2, 3, 4)
    relay.serve()
    relay.now += HEARTBEAT_S
    relay.effects.clear()
    relay.step(TICK)
    assert [set(each.gateways) for each in relay.take(ev.KeepStreams)] == [{GATEWAY}]
    assert relay.core.next_deadline() == relay.now + WALK_PAUSE_S, "one user is left"
    began = relay.now
    relay.tick()
    assert relay.core._walk_due == began + HEARTBEAT_S
    for uin in (2, 3, 4):
        relay.logout(uin)
    relay.now = began + HEARTBEAT_S
    relay.step(TICK)
    assert [set(each.gateways) for each in relay.take(ev.KeepStreams)] == [set()]
    relay.login(2)
    relay.serve()
    assert [list(each.gateways) for each in relay.take(ev.OpenStreams)] == [[GATEWAY]], "it had one, which ended"


def test_a_device_without_a_session_gets_one_by_its_heartbeat() -> None:
    relay = Relay()
    relay.login(2)
    (asked,) = relay.take(ev.AskPi)
    relay.answer(asked, 1)
    (asked,) = relay.take(ev.AskPi)
    relay.answer(asked, -4)  # a newer session was opened elsewhere
    assert relay.sessions == set()
    relay.now += HEARTBEAT_S
    relay.step(TICK)
    assert relay.sessions == {2}


def test_a_device_that_pi_does_not_know_is_asked_about_again() -> None:
    relay = Relay()
    relay.login(2)
    (asked,) = relay.take(ev.AskPi)
    relay.answer(asked, 1)
    (asked,) = relay.take(ev.AskPi)
    relay.answer(asked, -3)
    relay.now += HEARTBEAT_S
    relay.step(TICK)
    assert [each.operations for each in relay.take(ev.AskPi)] == [numbers(2)]


def test_numbers_that_pi_did_not_say_are_asked_for_again_after_a_pause() -> None:
    relay = Relay()
    relay.login(2)
    (asked,) = relay.take(ev.AskPi)
    relay.answer(asked)
    assert not relay.take(ev.AskPi)
    waited = 0.0
    while not (again := relay.take(ev.AskPi)):
        waited += relay.tick()
    assert again[0].operations == asked.operations
    assert 0.0 < waited <= 1.0


def test_a_relay_that_stops_serves_nobody_and_still_saves() -> None:
    relay = Relay()
    relay.login(2)
    relay.serve()
    relay.step(dv.Notified(1, 1, [mail(2, 1)]))
    relay.step(dv.Acknowledged(GATEWAY, [dv.Acknowledgement(2, 1, 5, 1, 1, 0)]))
    relay.step(dv.Stopping())
    assert relay.sessions == set()
    assert relay.take(ev.ConnectPis)[-1].partitions == 1
    (save,) = relay.take(ev.AskPi)
    relay.answer(save, 0)
    assert relay.core.deliveries.unsaved == 0
    relay.login(2, 3, at=9)
    relay.cluster()
    assert relay.sessions == set()


def test_what_moved_is_asked_of_the_child_at_once_and_a_child_that_is_not_open_is_asked_later() -> None:
    relay, (first, second) = acknowledged_by_two_partitions()
    relay.take(ev.ConnectPis)
    relay.answer(first, 0)
    relay.step(ev.PiAnswered(second.number, None, partitions=4))
    assert relay.take(ev.ConnectPis) == [ev.ConnectPis(4)]
    (again,) = relay.take(ev.AskPi)
    assert (again.partition, again.operations) == (3, saves(3))
    relay.step(ev.PiAnswered(again.number, None, partitions=2))
    assert relay.core.deliveries.unsaved == 1, "the child is not open: the cursor is saved later"
    relay.tick()
    (parent,) = relay.take(ev.AskPi)
    assert (parent.partition, parent.operations) == (1, saves(3)), "the cut may be undone"
    relay.step(ev.PiAnswered(parent.number, None, partitions=4))
    (child,) = relay.take(ev.AskPi)
    assert child.partition == 3
    relay.answer(child, 0)
    assert relay.core.deliveries.unsaved == 0
    relay.cluster(pis=4)
    relay.login(7)
    assert [each.partition for each in relay.take(ev.AskPi)] == [3]
    assert relay.sessions == {2, 3}, "no session ended"


def test_a_request_for_users_who_moved_and_others_goes_to_both_and_is_one_answer() -> None:
    relay = Relay(pis=1)
    relay.login(2, 3)
    relay.serve()
    relay.step(dv.Notified(1, 1, [mail(2, 1), mail(3, 1)]))
    relay.step(dv.Acknowledged(GATEWAY, [dv.Acknowledgement(uin, 1, 5, 1, 1, 0) for uin in (2, 3)]))
    relay.tick()
    (asked,) = relay.take(ev.AskPi)
    relay.step(ev.PiAnswered(asked.number, None, partitions=2))
    one, other = relay.take(ev.AskPi)
    assert [(one.partition, one.operations), (other.partition, other.operations)] == [(0, saves(2)), (1, saves(3))]
    relay.answer(one, 0)
    assert relay.core.deliveries.unsaved == 2
    relay.answer(other, 0)
    assert relay.core.deliveries.unsaved == 0
    relay.login(5)
    (numbered,) = relay.take(ev.AskPi)
    assert (numbered.partition, numbered.operations) == (1, numbers(5))
