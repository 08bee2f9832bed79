"""The gateway's core: mail of relays' sessions to connections, and what their clients acknowledge."""

from __future__ import annotations

import random

import pytest

from cluster.membership.map.devices import connection_of, device_key
from cluster.mqtt.mail import packet_id_of
from cluster.wire.v1 import control_pb2, delivery_pb2
from gateway import events as ev
from gateway.core import Core
from gateway.delivery.mail import SPARE_DEVICES, Acknowledgement, read_batch
from pixiu.errors import MalformedData
from pixiu.ids import EndpointID
from pixiu.wire.envelope import GAP, REDELIVERED, Delivery, encode
from pixiu.wire.record import Flag, Kind, decode
from pixiu.wire.record import encode as record_of
from tests.gateway.world import mails_of, of, runs_of, turn, updates
from tests.support.effort import portion
from tests.support.for_each import for_each

UIN, KEY, NUMBER = 7, device_key(1, 9), 3
WALL_MS = 1_700_000_000_000
FIRST, SECOND = 11, 12
"""Streams."""


def item(seq: int, *, session: int = 1, lane: int = 1, flags: int = 0, msg_id: int | None = None, uin: int = UIN) -> Delivery:
    record = b"" if flags & GAP else record_of(Kind.MAIL, uin, b"%d" % seq, 100 + seq)
    return Delivery(1000 + seq if msg_id is None else msg_id, seq, uin, session, NUMBER, lane, flags, record)


class Gateway:
    """A core with two relays' streams, and what it last told relays of devices."""

    def __init__(self) -> None:
        self.core = Core(instance=3, generation=5)
        self.core.step(ev.RelaysChanged(1, (ev.Replica(EndpointID(201), 0),)), 0.0)
        self.connect_time: dict[tuple[int, int], int] = {}
        self.takes_mail: dict[tuple[int, int], bool] = {}
        self.core.step(ev.MailStreamOpened(FIRST, EndpointID(201)), 0.0)
        self.core.step(ev.MailStreamOpened(SECOND, EndpointID(202)), 0.0)

    def step(self, *events: ev.Event) -> list[ev.Effect]:
        effects = turn(self.core, *events)
        for change in updates(effects):
            found = connection_of(change)
            self.connect_time[change.group, change.member] = found.connect_time
            self.takes_mail[change.group, change.member] = change.login and found.mail
        return [effect for effect in effects if not isinstance(effect, ev.SendMembership | ev.Answer)]

    def connect(self, connection: int, *, uin: int = UIN, packets: bool = False, mail: bool = True) -> None:
        self.step(ev.Opened(connection, uin, 3 * packets, 1, 9, WALL_MS))
        if mail:
            self.step(ev.Join(connection, 1, [], mail=True))

    def bound(self, *, uin: int = UIN) -> ev.MailDevice:
        return ev.MailDevice(uin, KEY, self.connect_time[uin, KEY], NUMBER)

    def take(self, *items: Delivery, stream: int = FIRST, bind: bool = True) -> list[ev.WriteMail]:
        devices = [self.bound()] if bind else []
        effects = self.step(ev.MailArrived(stream, devices, runs_of(items)))
        return of(ev.WriteMail, effects)

    def seqs(self, *items: Delivery, stream: int = FIRST, bind: bool = True) -> list[tuple[int, int, int, int]]:
        """What is written: (connection, InboxSeq, session, flags)."""
        writes = self.take(*items, stream=stream, bind=bind)
        return [(write.connection, one.seq, one.session, one.flags) for write in writes for one in mails_of(write.runs)]

    def acknowledge(self, *ranges: tuple[int, int, int], connection: int = 1) -> list[ev.Effect]:
        return self.step(ev.MailAcknowledged(connection, ranges))

    def said(self, stream: int = FIRST) -> list[Acknowledgement]:
        """Without what was written: see `written`."""
        return [each._replace(written=0) for each in self.core.mail.take_acknowledgements(stream, 100)]

    def written(self, stream: int = FIRST, *lanes: delivery_pb2.DeviceLane) -> list[tuple[int, int, int]]:
        """What is answered when the relay asks of lanes: (lane, acknowledged up to, written up to)."""
        self.step(ev.MailArrived(stream, [], [], lanes))
        return [(each.lane, each.up_to, each.written) for each in self.core.mail.take_acknowledgements(stream, 100)]


@pytest.fixture
def gateway() -> Gateway:
    """With one connection that takes mail: 1."""
    found = Gateway()
    found.connect(1)
    return found


def ack(up_to: int, bits: int = 0, *, lane: int = 1, session: int = 1) -> Acknowledgement:
    return Acknowledgement(UIN, NUMBER, session, lane, up_to, bits, 0)


def test_mail_goes_to_its_connection_in_order_and_its_acknowledgements_back(gateway: Gateway) -> None:
    assert gateway.seqs(item(1), item(2), item(3)) == [(1, 1, 1, 0), (1, 2, 1, 0), (1, 3, 1, 0)]
    assert gateway.said() == []
    assert gateway.acknowledge((1, 3, 3)) == [ev.AcknowledgementsDue(FIRST)]
    assert gateway.said() == [ack(0, 0b100)]
    gateway.acknowledge((1, 1, 1))
    gateway.acknowledge((1, 2, 2))
    assert gateway.said() == [ack(3)], "one for all that was acknowledged since"
    assert gateway.said(SECOND) == []
    assert (gateway.core.mail.unacknowledged, gateway.core.mail.counters.acknowledged) == (0, 3)


def test_a_relay_that_asks_is_told_up_to_where_mail_was_written(gateway: Gateway) -> None:
    gateway.take(item(1), item(2), item(8, lane=3))
    gateway.acknowledge((1, 1, 1))
    gateway.said()
    lanes = [delivery_pb2.DeviceLane(uin=UIN, device=NUMBER, session=1, lane=lane) for lane in (0, 1, 3)]
    assert set(gateway.written(FIRST, *lanes)) == {(0, 0, 0), (1, 1, 2), (3, 7, 8)}
    gateway.take(item(3)._replace(record=item(3).record[:-1] + b"?"), item(4))
    assert gateway.written(FIRST, lanes[1]) == [(1, 1, 2)], "neither what was damaged nor what stands behind it"
    wrong = [{"session": 2}, {"uin": UIN + 1}, {"lane": 9}]
    others = [delivery_pb2.DeviceLane(**{"uin": UIN, "device": NUMBER, "session": 1, "lane": 1, **each}) for each in wrong]
    assert gateway.written(FIRST, *others) == [], "another session, user, and a lane that there is not"


def test_each_lane_is_acknowledged_by_itself(gateway: Gateway) -> None:
    gateway.take(item(1), item(1, lane=0), item(8, lane=3))
    gateway.acknowledge((3, 8, 8), (0, 1, 1))
    assert set(gateway.said()) == {ack(8, lane=3), ack(1, lane=0)}


def test_what_is_not_above_what_was_written_is_dropped_and_answered_with_what_is_acknowledged(gateway: Gateway) -> None:
    gateway.take(item(1), item(2))
    gateway.acknowledge((1, 2, 2))
    gateway.said()
    effects = gateway.step(ev.MailArrived(FIRST, [], runs_of([item(2), item(1, flags=REDELIVERED)])))
    assert effects == [ev.AcknowledgementsDue(FIRST)]
    assert gateway.said() == [ack(0, 0b10)]
    assert gateway.core.mail.counters.repeats_dropped == 2


def test_a_lower_session_is_refused_after_a_higher_one(gateway: Gateway) -> None:
    gateway.take(item(1, session=4))
    assert gateway.take(item(2, session=3), stream=SECOND) == []
    assert gateway.core.mail.counters.sessions_refused == 1
    gateway.acknowledge((1, 1, 1))
    assert (gateway.said(SECOND), gateway.said()) == ([], [ack(1, session=4)])


def test_a_higher_session_begins_anew_and_marks_what_the_connection_was_written_before(gateway: Gateway) -> None:
    gateway.take(*(item(seq) for seq in range(1, 5)))
    gateway.acknowledge((1, 1, 2))
    (write,) = gateway.take(item(3, session=2), item(4, session=2), item(5, session=2), stream=SECOND)
    assert write.anew
    assert [(one.seq, one.flags) for one in mails_of(write.runs)] == [(3, REDELIVERED), (4, REDELIVERED), (5, 0)]
    assert gateway.core.mail.unacknowledged == 3
    gateway.acknowledge((1, 3, 5))
    assert (gateway.said(), gateway.said(SECOND)) == ([], [ack(5, session=2)]), "to the relay whose session it is"
    assert gateway.seqs(item(5, session=3), item(6, session=3, lane=0)) == [(1, 5, 3, REDELIVERED), (1, 6, 3, 0)]


def test_acknowledgements_of_unknown_numbers_are_counted_and_ignored(gateway: Gateway) -> None:
    assert gateway.acknowledge((1, 1, 1)) == []
    gateway.take(item(1), item(2))
    gateway.acknowledge((1, 9, 9), (1, 2, 1 << 63), (0, 1, 1))
    assert gateway.said() == [ack(0, 0b10)]
    gateway.acknowledge((1, 1, 1), connection=99)
    assert gateway.core.mail.counters.acknowledgements_unknown == 5
    # Of an earlier session: it comes again.
    gateway.take(item(1, session=2))
    gateway.acknowledge((1, 2, 2))
    assert gateway.said() == []
    assert gateway.core.mail.counters.acknowledgements_unknown == 6


def test_what_a_client_acknowledges_last_is_told_although_its_connection_ends(gateway: Gateway) -> None:
    gateway.take(item(1), item(2))
    gateway.acknowledge((1, 1, 1))
    assert ev.AcknowledgementsDue(FIRST) in gateway.step(ev.Closed(1, 1))
    assert gateway.said() == [ack(1)]
    assert gateway.core.mail.unacknowledged == 0
    assert gateway.take(item(3), bind=False) == []
    assert gateway.core.mail.counters.without_connection == 1
    assert gateway.acknowledge((1, 2, 2)) == []


def test_a_second_connection_of_the_device_gets_the_mail_by_a_new_connect_time(gateway: Gateway) -> None:
    old = gateway.bound()
    gateway.take(item(1), item(2))
    gateway.connect(2, mail=False)
    between = gateway.bound()
    assert between.connect_time > old.connect_time
    assert gateway.seqs(item(3), bind=False) == [], "of a connect time that is over"
    assert gateway.seqs(item(1, session=2), item(2, session=2), item(3, session=2))[-1] == (1, 3, 2, 0)
    # The newest that takes mail gets it: relays are to begin a new session for it, else it would miss what is under way.
    gateway.step(ev.Join(2, 1, [], mail=True))
    assert gateway.bound().connect_time > between.connect_time
    assert gateway.take(item(4, session=2), bind=False) == []
    assert gateway.seqs(item(1, session=3), item(4, session=3)) == [(2, 1, 3, 0), (2, 4, 3, 0)]
    # And when it goes, the older one again, with what it was written before marked.
    last = gateway.bound()
    gateway.step(ev.Closed(2, 1))
    assert gateway.bound().connect_time > last.connect_time
    assert gateway.takes_mail[UIN, KEY]
    assert gateway.seqs(item(3, session=4), item(4, session=4)) == [(1, 3, 4, REDELIVERED), (1, 4, 4, 0)]


def test_the_device_that_takes_mail_a_second_time_at_one_gateway_replaces_the_first() -> None:
    gateway = Gateway()
    gateway.connect(1)
    gateway.connect(2, mail=False)
    replaced = of(ev.Disconnect, gateway.step(ev.Join(2, 1, [], mail=True)))
    assert replaced == [ev.Disconnect(1, control_pb2.REASON_MOVED)]
    assert of(ev.Disconnect, gateway.step(ev.Join(2, 2, [], mail=True))) == [], "it asks again, and stays"
    gateway.connect(3, uin=8)
    assert of(ev.Disconnect, gateway.step(ev.Closed(1, control_pb2.REASON_MOVED))) == []
    assert gateway.seqs(item(1, session=2)) == [(2, 1, 2, 0)]


def test_who_takes_mail_again_is_told_with_a_new_connect_time() -> None:
    gateway = Gateway()
    gateway.connect(1, mail=False)
    first = gateway.bound()
    gateway.step(ev.Join(1, 1, [], mail=True))
    assert (gateway.bound(), gateway.takes_mail[UIN, KEY]) == (first, True)
    gateway.take(item(1))
    gateway.step(ev.Leave(1, [], mail=True))
    assert (gateway.bound(), gateway.takes_mail[UIN, KEY]) == (first, False)
    assert gateway.take(item(2)) == []
    gateway.step(ev.Join(1, 2, [], mail=True))
    assert gateway.bound().connect_time > first.connect_time
    assert gateway.core.devices.mail_connections == 1
    gateway.step(ev.Closed(1, 1))
    assert gateway.core.devices.mail_connections == 0


def test_a_join_with_mail_is_answered_when_relays_know_the_device() -> None:
    gateway = Gateway()
    gateway.connect(1, mail=False)
    effects = gateway.core.step(ev.Join(1, 5, [], chat=True, mail=True), 1.0)
    assert effects == []
    (said,) = of(ev.SendMembership, turn(gateway.core))
    found = connection_of(said.messages[-1])
    assert (found.chat, found.mail) == (True, True)


def test_a_marker_is_passed_on_and_of_what_the_inbox_dropped_releases_what_waits(gateway: Gateway) -> None:
    gateway.take(item(1), item(2))
    assert gateway.seqs(item(3, flags=GAP), item(900, flags=GAP, msg_id=0)) == [(1, 3, 1, GAP), (1, 900, 1, GAP)]
    assert gateway.core.mail.unacknowledged == 1
    gateway.acknowledge((1, 900, 900))
    assert gateway.said() == [ack(900)]
    assert (gateway.core.mail.counters.gaps, gateway.core.mail.counters.delivered) == (2, 2)


def test_for_an_mqtt_client_the_gateway_acknowledges_markers_itself() -> None:
    gateway = Gateway()
    gateway.connect(1, packets=True)
    assert gateway.seqs(item(1), item(2, flags=GAP), item(3)) == [(1, 1, 1, 0), (1, 3, 1, 0)]
    assert gateway.said() == [ack(0, 0b10)]
    gateway.step(ev.PacketsAcknowledged(1, [packet_id_of(1, 3), packet_id_of(1, 1), packet_id_of(1, 9), packet_id_of(0, 1)]))
    assert gateway.said() == [ack(3)]
    counters = gateway.core.mail.counters
    assert (counters.gaps_untold, counters.acknowledgements_unknown) == (1, 2)
    gateway.step(ev.PacketsAcknowledged(5, [1]))
    assert counters.acknowledgements_unknown == 3


def test_nothing_is_written_behind_what_was_damaged_until_it_has_come_again(gateway: Gateway) -> None:
    damaged = item(2)._replace(record=item(2).record[:-1] + b"?")
    assert gateway.seqs(item(1), damaged, item(3)) == [(1, 1, 1, 0)]
    gateway.acknowledge((1, 1, 1))
    assert gateway.said() == [ack(1)]
    assert gateway.seqs(item(2), item(3)) == [(1, 2, 1, 0), (1, 3, 1, 0)]
    assert (gateway.core.mail.counters.damaged, gateway.core.mail.counters.held_back) == (1, 1)


def test_a_relay_cannot_make_more_wait_than_the_windows_hold(gateway: Gateway) -> None:
    items = [item(seq, lane=lane) for lane in range(4) for seq in range(1, 1000)]
    (write,) = gateway.take(*items)
    assert len(mails_of(write.runs)) == gateway.core.mail.unacknowledged == 4 * 64
    assert gateway.take(*(item(seq, session=2) for seq in range(1, 3)))[0].anew
    assert gateway.core.mail.unacknowledged == 2


def test_the_streams_of_a_relay_that_ended_get_nothing_and_a_repeat_on_the_next_one_is_answered(gateway: Gateway) -> None:
    gateway.take(item(1), item(2))
    gateway.step(ev.MailStreamClosed(FIRST))
    assert gateway.acknowledge((1, 1, 2)) == []
    assert gateway.step(ev.MailArrived(FIRST, [gateway.bound()], runs_of([item(3)]))) == []
    gateway.step(ev.MailStreamOpened(13, EndpointID(201)))
    assert gateway.take(item(1), stream=13, bind=False) == [], "it has not said which connection it means"
    assert gateway.take(item(1), stream=13) == []
    assert gateway.said(13) == [ack(2)]


def test_a_relay_that_opens_another_stream_loses_the_older_one(gateway: Gateway) -> None:
    (end,) = gateway.step(ev.MailStreamOpened(13, EndpointID(201)))
    assert isinstance(end, ev.EndMailStream)
    assert (end.stream, end.at_fault, gateway.core.mail.streams) == (FIRST, False, 2)


def test_a_relay_that_names_devices_without_end_loses_its_stream(gateway: Gateway) -> None:
    gone = [ev.MailDevice(UIN, KEY, 5, number) for number in range(3 * SPARE_DEVICES)]
    assert gateway.step(ev.MailArrived(FIRST, gone, [])) == [], "what is not here is not kept"
    many = [gateway.bound()._replace(device=number) for number in range(3 * SPARE_DEVICES)]
    (end,) = gateway.step(ev.MailArrived(FIRST, many, runs_of([item(1)])))
    assert isinstance(end, ev.EndMailStream)
    assert (end.stream, end.at_fault, gateway.core.mail.streams) == (FIRST, True, 1)


def test_devices_that_left_are_forgotten_where_there_are_many() -> None:
    gateway = Gateway()
    for number in range(1, SPARE_DEVICES + 10):
        gateway.connect(number, uin=number)
        gateway.step(ev.MailArrived(FIRST, [gateway.bound(uin=number)], []), ev.Closed(number, 1))
    gateway.connect(9999)
    assert gateway.seqs(item(1)) == [(9999, 1, 1, 0)]


def test_batches_are_read_as_a_whole_or_not_at_all() -> None:
    mails = [item(1), item(2, flags=GAP)]
    data = b"".join(encode(*one) for one in mails)
    device = delivery_pb2.MailDevice(uin=UIN, key=KEY, connect_time=5, device=NUMBER)
    batch = delivery_pb2.DeliveryBatch(devices=[device], deliveries=data, count=2)
    devices, runs = read_batch(batch)
    assert (devices, mails_of(runs)) == ([ev.MailDevice(UIN, KEY, 5, NUMBER)], mails)
    assert read_batch(delivery_pb2.DeliveryBatch()) == ([], [])
    for wrong in (
        delivery_pb2.DeliveryBatch(deliveries=data, count=3),
        delivery_pb2.DeliveryBatch(deliveries=data, count=0),
        delivery_pb2.DeliveryBatch(deliveries=data, count=1),
        delivery_pb2.DeliveryBatch(deliveries=data[:-1], count=2),
        delivery_pb2.DeliveryBatch(count=1),
        *(delivery_pb2.DeliveryBatch(deliveries=encode(*one), count=1) for one in (item(1, lane=4), item(0), item(1, session=0))),
    ):
        with pytest.raises(MalformedData):
            read_batch(wrong)


@for_each("seed", portion(range(20)))
def test_a_run_is_written_and_acknowledged_as_its_mails_are_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    together, apart = Gateway(), Gateway()
    for gateway in (together, apart):
        gateway.connect(1)
        gateway.connect(2, uin=8, packets=True)
    longest = 0
    for number in range(400):
        some = []
        for _ in range(rng.randrange(3)):
            uin, lane, session = rng.choice((7, 8)), rng.randrange(2), number // 80 + 1 - (rng.random() < 0.1)
            first = max(1, number % 80 * 3 + rng.randrange(-6, 70 if rng.random() < 0.1 else 6))
            mails = [item(seq, uin=uin, lane=lane, session=session or 1) for seq in range(first, first + rng.randrange(1, 12))]
            if rng.random() < 0.1:
                at = rng.randrange(len(mails))
                mails[at] = rng.choice(
                    (mails[at]._replace(record=mails[at].record[:-1] + b"?"), item(mails[at].seq, uin=uin, lane=lane, flags=GAP))
                )
            some += mails
        runs = runs_of(some)
        longest = max(longest, *(run.count for run in runs), 0)
        acknowledged = rng.random() < 0.7, rng.randrange(1, 70), rng.random() < 0.2
        written = []
        for gateway, batch in ((together, runs), (apart, [run for one in some for run in runs_of([one])])):
            devices = [gateway.bound(uin=uin) for uin in (7, 8)]
            writes = of(ev.WriteMail, gateway.step(ev.MailArrived(FIRST, devices, batch)))
            said: list[tuple[object, ...]] = []
            for write in writes:
                mails = mails_of(write.runs)
                bodies = [body for run in write.runs for body in run.bodies]
                assert bodies == [decode(one.record).body for one in mails if one.record]
                said.append((write.connection, mails, write.anew))
                if acknowledged[0]:
                    ids = [packet_id_of(one.lane, one.seq) for one in mails][: acknowledged[1]]
                    ids += ids[:1] if acknowledged[2] else []
                    ranges = [(one.lane, one.seq, one.seq) for one in mails]
                    packets = write.connection == 2
                    gateway.step(ev.PacketsAcknowledged(2, ids) if packets else ev.MailAcknowledged(1, ranges))
            said += gateway.core.mail.take_acknowledgements(FIRST, 100)
            written.append((said, gateway.core.mail.counters, gateway.core.mail.unacknowledged))
        assert written[0] == written[1]
    assert longest > 5


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.slow
def test_at_random_nothing_raises_and_everything_stays_bounded(seed: int) -> None:
    rng = random.Random(seed)
    gateway = Gateway()
    gateway.connect(1)
    gateway.connect(2, uin=8, packets=True)
    last: dict[tuple[int, int, int], int] = {}
    for number in range(3, 1500):
        sessions, seqs = (1, 1, number // 300 + 1, 1 << 31), (1, 2, 3, rng.randrange(1, 200), 1 << 63)
        some = [
            item(
                rng.choice(seqs), session=rng.choice(sessions), lane=rng.randrange(4), uin=rng.choice((7, 8, 9)),
                flags=rng.choice((0, REDELIVERED, GAP)), msg_id=rng.choice((0, 5)),
            )
            for _ in range(rng.randrange(5))
        ]  # fmt: skip
        devices = [gateway.bound(uin=uin) for uin in (7, 8) if rng.random() < 0.5]
        events: list[ev.Event] = [
            ev.MailArrived(rng.choice((FIRST, SECOND, 99)), devices, runs_of(some)),
            ev.MailAcknowledged(rng.choice((1, 2, 5)), [(rng.randrange(4), seq, seq + rng.randrange(100)) for seq in seqs[:4]]),
            ev.PacketsAcknowledged(rng.choice((1, 2, 5)), [rng.randrange(1 << 16), packet_id_of(1, 2)]),
            rng.choice((ev.MailStreamClosed(FIRST), ev.MailStreamOpened(FIRST, EndpointID(201)), ev.Leave(1, [], mail=True))),
            ev.Join(1, number, [], mail=True),
        ]
        rng.shuffle(events)
        for write in of(ev.WriteMail, gateway.step(*events)):
            for one in mails_of(write.runs):
                place = write.connection, one.session, one.lane
                assert one.seq > last.get(place, 0) or write.connection == 1, "in order, but for who took mail anew"
                last[place] = one.seq
        assert 0 <= gateway.core.mail.unacknowledged <= 2 * 4 * 64
        for stream in (FIRST, SECOND):
            if rng.random() < 0.5:
                said = gateway.core.mail.take_acknowledgements(stream, 8)
                assert len(said) <= 8
                assert all(one.bits < 1 << 64 for one in said)
    assert gateway.core.mail.counters.delivered > 50
    gateway.step(ev.Closed(1, 1), ev.Closed(2, 1))
    assert gateway.core.mail.unacknowledged == 0


def test_mail_of_load_tests_is_acknowledged_for_mqtt_clients() -> None:
    marked = record_of(Kind.MAIL, UIN, b"load", 5, flags=Flag.LOAD_TEST)
    items = [item(1), item(2)._replace(record=marked), item(3)]
    mqtt, other = Gateway(), Gateway()
    mqtt.connect(1, packets=True)
    other.connect(1)
    assert [seq for _, seq, _, _ in mqtt.seqs(*items)] == [1, 3]
    assert mqtt.said() == [ack(0, 0b10)]
    assert mqtt.core.mail.counters.load_test_blocked == 1
    assert [seq for _, seq, _, _ in other.seqs(*items)] == [1, 2, 3]
    assert other.said() == []
