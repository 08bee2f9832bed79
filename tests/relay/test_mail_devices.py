"""Which devices take mail from a relay, by relay data, by who owns the user, and by Pi's numbers."""

from __future__ import annotations

from cluster.membership.map.devices import Connection, connected, device_key
from cluster.membership.map.updates import Update, decode_messages, encode_messages
from cluster.wire.v1 import control_pb2
from pixiu.ids import gateway_msg_id
from pixiu.wire.inbox_operations import KEPT_NAME_BYTES
from relay.delivery import events as ev
from relay.mail.devices import LATER_S, MAX_ASKED, NUMBER_AGE_S, REFUSED_S, Looked, MailDevices, TrackedDevices

ME, OTHER = 900, 901
GATEWAYS = {1: 101, 2: 102}


class Relay:
    """Relay data and the devices that take mail."""

    def __init__(self, *owners: int) -> None:
        self.called = 0
        self.data = TrackedDevices(self._changed)
        self.gateways = dict(GATEWAYS)
        self.mail = MailDevices(self.data, self.gateways.get, ME)
        self.mail.set_owners(owners or (ME,), 0, 1)
        self._counter = 0
        self.now = 100.0

    def _changed(self) -> None:
        self.called += 1

    def login(self, uin: int, device: int, at: int, instance: int = 1, *, mail: bool = True) -> None:
        """A gateway says so."""
        self._counter += 1
        id_ = gateway_msg_id(instance, 1, self._counter)
        self.data.apply([connected(id_, uin, device_key(device, 3), at, chat=True, mail=mail)], self.now)

    def logout(self, uin: int, device: int, instance: int = 1) -> None:
        """A gateway says so."""
        self._counter += 1
        self.data.apply([Update(gateway_msg_id(instance, 1, self._counter), uin, device_key(device, 3), False)], self.now)

    def look(self) -> Looked:
        """What changed."""
        return self.mail.look(self.data.take(), self.now)

    def number(self, answer: int | ev.Failure = 1) -> list[ev.Login | None]:
        """Pi's answers to what is asked."""
        return [self.mail.numbered(uin, device, answer, self.now) for uin, device in self.mail.to_number(self.now)]


def test_the_value_of_relay_data_says_who_takes_mail() -> None:
    change = connected(5, 7, 8, 1234, chat=False, mail=True)
    assert change.value == 1234 << 3 | 4 | 1
    data = Relay().data
    data.apply([change], 0.0)
    assert data.connections(7) == [Connection(8, 0, 1234, chat=False, login=True, mail=True)]


def test_a_session_of_mqtt_takes_mail_and_is_nobody_who_is_online() -> None:
    relay = Relay()
    relay.login(7, 70, 4)
    relay.look()
    session = connected(gateway_msg_id(1, 2, 1), 9, device_key(1, 0), 5, chat=False, login=False, mail=True, name="meter-5")
    relay.data.apply([session], relay.now)
    assert (relay.data.users, relay.data.sessions) == (1, {9: None})
    assert relay.data.connections(9) == []
    assert relay.data.rivals(session) == []
    relay.look()
    assert (9, 1) in relay.mail.to_number(relay.now)
    assert relay.mail.name(9, 1) == "meter-5"
    assert relay.mail.numbered(9, 1, 3, relay.now) == ev.Login(9, 3, 101, 5)
    newer = connected(gateway_msg_id(2, 2, 1), 9, device_key(1, 0), 6, chat=False, login=False, mail=True)
    relay.data.apply([newer], relay.now)
    assert relay.look().logged_in == [ev.Login(9, 3, 102, 6)], "the newest connection of a client takes its session over"
    for instance in (1, 2):
        gone = Update(gateway_msg_id(instance, 2, 2), 9, device_key(1, 0), False)
        relay.data.apply([gone], relay.now)
    assert relay.look().logged_out == [ev.Login(9, 3, 102, 6)]
    assert (relay.data.users, relay.data.sessions) == (1, {})


def test_a_device_logs_in_when_its_number_is_known_and_out_when_it_goes() -> None:
    relay = Relay()
    relay.login(7, 70, 5)
    assert relay.called == 1
    assert relay.look() == Looked()
    assert relay.mail.to_number(relay.now) == [(7, 70)]
    assert relay.mail.to_number(relay.now) == []
    assert relay.mail.numbered(7, 70, 3, relay.now) == ev.Login(7, 3, 101, 5)
    place = relay.mail.place(7, 3)
    assert place is not None
    assert (place.key, place.gateway) == (device_key(70, 3), 101)
    relay.logout(7, 70)
    assert relay.look() == Looked(logged_out=[ev.Login(7, 3, 101, 5)])
    assert (relay.mail.place(7, 3), len(relay.mail), relay.data.takers) == (None, 0, {})
    relay.login(7, 70, 9, instance=2)  # the number is remembered
    assert relay.look() == Looked(logged_in=[ev.Login(7, 3, 102, 9)])


def test_a_devices_name_is_there_until_pi_has_been_told_or_the_device_goes() -> None:
    relay = Relay()
    for device, name in ((70, "phone"), (71, "desk")):
        change = connected(gateway_msg_id(1, 1, device), 7, device_key(device, 3), 5, chat=True, mail=True, name=name)
        relay.data.apply(decode_messages(control_pb2.Control.FromString(encode_messages([change])[0]).gateway_messages), relay.now)
    relay.look()
    assert (relay.mail.name(7, 70), relay.mail.name(7, 71), relay.mail.name(7, 72)) == ("phone", "desk", "")
    relay.logout(7, 71)
    relay.number()
    assert relay.data.names == {}


def test_messages_with_names_fit_a_datagram() -> None:
    changes = [connected(1 << 62, 1 << 62, 1 << 62, 1 << 50, chat=True, mail=True, name="x" * KEPT_NAME_BYTES)] * 20
    assert max(map(len, encode_messages(changes))) < 1200


def test_who_takes_no_mail_is_not_looked_at() -> None:
    relay = Relay()
    relay.login(7, 70, 5, mail=False)
    assert (relay.called, relay.data.take()) == (0, [])
    relay.login(7, 71, 5)
    relay.login(7, 70, 6, mail=False)
    assert relay.data.take() == [7]
    assert relay.mail.look([7], relay.now) == Looked()
    assert relay.mail.to_number(relay.now) == [(7, 71)]


def test_a_newer_connection_replaces_and_an_older_one_that_is_there_again_comes_behind_a_logout() -> None:
    relay = Relay()
    relay.login(7, 70, 5)
    relay.look()
    relay.number(2)
    relay.login(7, 70, 8, instance=2)
    assert relay.look() == Looked(logged_in=[ev.Login(7, 2, 102, 8)])
    relay.logout(7, 70, instance=2)
    assert relay.look() == Looked(logged_out=[ev.Login(7, 2, 102, 8)], logged_in=[ev.Login(7, 2, 101, 5)])


def test_devices_of_users_that_others_own_are_left_to_them() -> None:
    relay = Relay(ME, OTHER)
    uins = list(range(1, 41))
    for uin in uins:
        relay.login(uin, 70, 5)
    relay.look()
    mine = [uin for uin in uins if relay.mail.owns(uin)]
    assert 0 < len(mine) < len(uins)
    assert [login.uin for login in relay.number() if login] == mine
    assert not relay.mail.set_owners((ME, OTHER), 0, 1)
    assert relay.mail.set_owners((ME,), 0, 1)
    relay.mail.look(relay.mail.users(), relay.now)
    assert len(relay.number()) == len(uins) - len(mine)
    assert relay.mail.set_owners((OTHER,), 0, 1)
    assert len(relay.mail.look(relay.mail.users(), relay.now).logged_out) == len(uins)
    assert relay.mail.set_owners((ME,), 0, 2)
    assert not relay.mail.owns(3)  # of the other partition


def test_a_gateway_out_of_reach_has_nobody() -> None:
    relay = Relay()
    relay.login(7, 70, 5)
    relay.look()
    relay.number()
    del relay.gateways[1]
    assert relay.mail.look(relay.mail.users(), relay.now) == Looked(logged_out=[ev.Login(7, 1, 101, 5)])


def test_heartbeats_of_devices_without_a_session() -> None:
    relay = Relay()
    relay.login(7, 70, 5)
    relay.login(8, 80, 6)
    relay.look()
    relay.number(4)
    served = {ev.Device(8, 4): None}
    looked = relay.mail.look(relay.mail.users(), relay.now, served)
    assert looked == Looked(still_there=[ev.Login(7, 4, 101, 5)])


def test_pi_is_asked_again_when_it_did_not_answer_and_seldom_when_it_refused() -> None:
    relay = Relay()
    relay.login(7, 70, 5)
    relay.look()
    assert relay.number(ev.Failure.LATER) == [None]
    assert relay.mail.to_number(relay.now) == []
    relay.now += LATER_S
    assert relay.number(ev.Failure.REFUSED) == [None]
    assert relay.mail.refused == 1
    relay.now += REFUSED_S - 1
    relay.mail.look([7], relay.now, {})
    assert relay.number() == []
    relay.now += 1
    relay.mail.look([7], relay.now, {})
    assert relay.number(2) == [ev.Login(7, 2, 101, 5)]
    relay.mail.forget(7, 2)
    assert relay.mail.place(7, 2) is None
    relay.mail.look([7], relay.now, {})
    assert relay.number(3) == [ev.Login(7, 3, 101, 5)]


def test_an_old_number_is_not_believed() -> None:
    relay = Relay()
    relay.login(7, 70, 5)
    relay.look()
    relay.number(2)
    relay.logout(7, 70)
    relay.look()
    relay.now += NUMBER_AGE_S
    relay.login(7, 70, 9)
    assert relay.look() == Looked()
    assert relay.number(5) == [ev.Login(7, 5, 101, 9)]


def test_so_many_are_asked_about_at_a_time() -> None:
    relay = Relay()
    for uin in range(1, MAX_ASKED + 11):
        relay.login(uin, 70, 5)
    relay.look()
    assert len(relay.mail.to_number(relay.now)) == MAX_ASKED
    assert relay.mail.to_number(relay.now) == []
    relay.mail.numbered(1, 70, 1, relay.now)
    assert relay.mail.to_number(relay.now) == [(MAX_ASKED + 1, 70)]
    assert relay.mail.unnumbered == MAX_ASKED + 9


def test_what_is_purged_is_noted() -> None:
    relay = Relay()
    relay.login(7, 70, 5)
    relay.look()
    relay.data.raise_floor(1, 2)
    relay.data.purge_some()
    assert relay.called == 2
    assert relay.look() == Looked()
    assert relay.data.takers == {}
