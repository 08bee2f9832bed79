"""The mail pipeline of a proxy: what it sends where, in which order, and what senders are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from cluster.core.contract import END_OF_TURN, NEVER, TICK
from pixiu.errors import Refusal, Unavailable, all_errors
from pixiu.ids import MAX_ID, msg_id, snowflake
from pixiu.wire.inbox_operations import APPEND, Appends, Code, Fanout, decode
from pixiu.wire.inbox_operations import Writer as PiWriter
from pixiu.wire.levels import Level, Triple
from pixiu.wire.record import Flag, Kind, encode
from proxy import mail_events as ev
from proxy.mail import pipeline as mail
from proxy.mail import requests as mail_requests
from proxy.mail.pipeline import MailCore
from tests.support.work import steps

XIU, PI = ev.Store(False, 0), ev.Store(True, 0)
TIMEOUT_S = 15.0
Kept = TypeVar("Kept")


def record(number: int, key: int, *, lane: int = 1, kind: int = Kind.MAIL, flags: int = 0) -> bytes:
    """A mail whose SnowflakeID is told by its number."""
    return encode(kind, key, b"body %d" % number, snowflake(1_750_000_000_000, 5, number), type=lane << 6, flags=flags)


class Pipeline:
    """A core with its links up, and what it asked for since it was last looked at."""

    def __init__(self, xius: int = 1, pis: int = 1, *, linked: bool = True, taken: bool = True) -> None:
        self.core = MailCore(max_record_bytes=1 << 16, timeout_s=TIMEOUT_S, taken=taken)
        self.now = 100.0
        self.effects: list[ev.Effect] = []
        self._linked = linked
        self._links = 0
        self.links: dict[ev.Store, int] = {}
        self.epochs: dict[ev.Store, int] = {}
        self.step(ev.StoresChanged(xius, pis))
        self.step(ev.WriterOpened(1, 9, 70))

    def step(self, event: ev.Event) -> None:
        """An event; links come up at once where they are wanted."""
        found = self.core.step(event, self.now)
        self.effects += found
        if self._linked:
            for effect in found:
                if isinstance(effect, ev.Connect | ev.Disconnect):
                    self.up(effect.store)

    def up(self, store: ev.Store, epoch: int = 3) -> None:
        """A link is open."""
        self._links += 1
        self.links[store], self.epochs[store] = self._links, epoch
        self.step(ev.LinkUp(store, self._links, epoch))

    def turn(self) -> None:
        """The turn ends."""
        self.step(END_OF_TURN)
        self.step(END_OF_TURN)

    def mail(self, *records: bytes, position: int, level: Level = Level.REPLICATED, stream: int = 1, **more: Sequence[int]) -> None:
        """A batch; `more`: m0=[…] for the further receivers of record 0."""
        receivers = {int(name[1:]): uins for name, uins in more.items()}
        self.step(ev.MailReceived(stream, b"".join(records), len(records), position, level, receivers))
        self.turn()

    def take(self, kind: type[Kept]) -> list[Kept]:
        """Effects of a kind since the last time."""
        found: list[Any] = [effect for effect in self.effects if isinstance(effect, kind)]
        kept: list[ev.Effect] = [effect for effect in self.effects if not isinstance(effect, kind)]
        self.effects = kept
        return found

    def stored(self, *runs: ev.StoredRun, partition: int = 0, epoch: int = 0, copies: int = 2) -> None:
        """A Xiu answers."""
        store = ev.Store(False, partition)
        triple = Triple(1, epoch or self.epochs[store], 50)
        self.step(ev.Stored(partition, self.links[store], runs, triple, copies))
        self.turn()

    def store_all(self, first: int = 1, partition: int = 0) -> None:
        """The Xiu stores what it was sent, under sequences from `first` on."""
        for sent in self.take(ev.SendStore):
            if sent.partition == partition:
                self.stored(ev.StoredRun(sent.position, sent.count, first, 0), partition=partition)
                first += sent.count
            else:
                self.effects.append(sent)

    def appended(
        self, sent: ev.SendAppend, results: Sequence[int] = (), *, code: str = "", epoch: int = 0, copies: int = 2
    ) -> None:  # fmt: skip
        """A Pi answers."""
        store = ev.Store(True, sent.partition)
        triple = Triple(1, epoch or self.epochs[store], 60)
        refusal = Refusal(code, "says the test") if code else None
        self.step(ev.Appended(sent.partition, self.links[store], sent.request, results, refusal, triple, copies))
        self.turn()

    def results(self, stream: int = 1) -> list[ev.Result]:
        """What a writer was told."""
        return [result for answer in self.take(ev.Answer) if answer.stream == stream for result in answer.results]

    def one_append(self) -> tuple[ev.SendAppend, Appends | Fanout]:
        """The only request to Pi, and its only operation."""
        (sent,) = self.take(ev.SendAppend)
        (operation,) = decode(sent.operations)
        assert isinstance(operation, Appends | Fanout)
        return sent, operation


def test_a_batch_goes_to_xiu_then_to_pi_then_the_sender_is_told() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), record(2, 8), position=1)
    (sent,) = pipeline.take(ev.SendStore)
    assert (sent.partition, sent.count, sent.level, sent.epoch) == (0, 2, Level.REPLICATED, 3)
    assert sent.data == record(1, 7) + record(2, 8)
    assert not pipeline.take(ev.SendAppend)
    pipeline.stored(ev.StoredRun(sent.position, 2, 40, 0))
    append, operation = pipeline.one_append()
    ids = [msg_id(0, 64, 40), msg_id(0, 64, 41)]
    assert operation == Appends(PiWriter(9, 70, 3), APPEND.pack(ids[0], 7) + APPEND.pack(ids[1], 8))
    assert not pipeline.results()
    pipeline.appended(append, [1, 5])
    (answer,) = pipeline.take(ev.Answer)
    assert answer.results == [ev.Result(1, 2, 2, ids)]
    assert answer.triples == {XIU: Triple(1, 3, 50), PI: Triple(1, 3, 60)}
    assert (answer.unconfirmed_bytes, pipeline.core.under_way, pipeline.core.waiting_bytes) == (0, 0, 0)
    (grown,) = pipeline.take(ev.InboxesGrew)
    assert list(grown.items()) == [(7, 1, 1, ids[0], record(1, 7)), (8, 1, 5, ids[1], record(2, 8))]


def test_copies_are_those_of_the_store_that_has_fewer_and_lower_levels_have_one() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    pipeline.store_all()
    pipeline.appended(pipeline.one_append()[0], [1], copies=1)
    assert [result.copies for result in pipeline.results()] == [1]
    pipeline.mail(record(2, 7), position=2, level=Level.ACCEPTED)
    (sent,) = pipeline.take(ev.SendStore)
    assert sent.level is Level.ACCEPTED
    pipeline.stored(ev.StoredRun(sent.position, 1, 2, 0))
    append, _ = pipeline.one_append()
    assert append.level is Level.ACCEPTED
    pipeline.appended(append, [])
    assert [(result.copies, result.code) for result in pipeline.results()] == [(1, "")]
    (*_, grown) = pipeline.take(ev.InboxesGrew)
    assert [seq for _, _, seq, _, _ in grown.items()] == [0]


def test_what_was_stored_before_has_its_old_msg_id() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    (sent,) = pipeline.take(ev.SendStore)
    pipeline.stored(ev.StoredRun(sent.position, 1, 0, msg_id(0, 64, 12)))
    append, _ = pipeline.one_append()
    pipeline.appended(append, [4])
    assert pipeline.results() == [ev.Result(1, 1, 2, [msg_id(0, 64, 12)])]


@pytest.mark.parametrize("code", ["ID_REUSED", "TOO_OLD", "ID_AHEAD", "DISK_FULL", "CHECKSUM_WRONG"])
def test_what_xiu_refuses_for_good_is_told_and_the_others_go_on(code: str) -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), record(2, 7), record(3, 7), position=1)
    (sent,) = pipeline.take(ev.SendStore)
    runs = [ev.StoredRun(sent.position + 1, 1, 0, 0, Refusal(code, "why")), ev.StoredRun(sent.position, 1, 1, 0)]
    pipeline.stored(*runs, ev.StoredRun(sent.position + 2, 1, 2, 0))
    assert pipeline.results() == [ev.Result(2, 1, 0, (), code, "why")]
    append, operation = pipeline.one_append()
    assert isinstance(operation, Appends)
    assert [uin for _, uin in APPEND.iter_unpack(operation.items)] == [7, 7]
    pipeline.appended(append, [1, 2])
    assert [(result.position, result.code) for result in pipeline.results()] == [(1, ""), (3, "")]
    assert not pipeline.take(ev.EndWriter)


@pytest.mark.parametrize("code", ["OVERLOADED", "UNAVAILABLE", "TOO_FEW_IN_SYNC"])
def test_what_xiu_refuses_for_now_is_stored_again_and_the_stream_goes_on(code: str) -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    (sent,) = pipeline.take(ev.SendStore)
    pipeline.stored(ev.StoredRun(sent.position, 1, 0, 0, Refusal(code, "busy")))
    assert not pipeline.take(ev.SendStore)
    pipeline.now += mail.PAUSE_S
    pipeline.step(TICK)
    pipeline.store_all()
    pipeline.appended(pipeline.one_append()[0], [1])
    assert [result.code for result in pipeline.results()] == [""]
    assert not pipeline.take(ev.EndWriter)


def test_what_is_refused_for_too_long_ends_the_stream_with_its_code() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    while pipeline.now < 100 + TIMEOUT_S:
        for sent in pipeline.take(ev.SendStore):
            pipeline.stored(ev.StoredRun(sent.position, 1, 0, 0, Refusal("OVERLOADED", "the table is full")))
        pipeline.now += 0.5
        pipeline.step(TICK)
    (end,) = pipeline.take(ev.EndWriter)
    assert end.why.code == "OVERLOADED"
    assert "xiu partition 0 did not confirm within 15 s" in end.why.text
    assert "the table is full" in end.why.text


def test_a_store_is_left_alone_for_as_long_as_it_asks_and_the_writer_hears_of_it() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    (sent,) = pipeline.take(ev.SendStore)
    pipeline.stored(ev.StoredRun(sent.position, 1, 0, 0, Refusal("OVERLOADED", "the table is full", 2000)))
    pipeline.now += 1.9
    pipeline.step(TICK)
    assert not pipeline.take(ev.SendStore)
    pipeline.now += 0.2
    pipeline.step(TICK)
    assert pipeline.take(ev.SendStore)
    pipeline.now += TIMEOUT_S
    pipeline.step(TICK)
    (end,) = pipeline.take(ev.EndWriter)
    assert (end.why.code, end.why.retry_after_ms) == ("OVERLOADED", 2000)


def test_a_lost_xiu_leader_costs_nothing_but_time() -> None:
    pipeline = Pipeline(linked=False)
    pipeline.mail(record(1, 7), position=1)
    pipeline.up(XIU)
    pipeline.turn()
    first = pipeline.take(ev.SendStore)
    pipeline.step(ev.LinkDown(XIU, pipeline.links[XIU], "gone"))
    pipeline.turn()
    assert not pipeline.take(ev.SendStore)
    pipeline.up(XIU, epoch=4)
    pipeline.turn()
    (again,) = pipeline.take(ev.SendStore)
    assert (again.data, again.epoch) == (first[0].data, 4)
    assert not pipeline.take(ev.EndWriter)


def test_another_epoch_of_xiu_is_asked_for_again() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    (sent,) = pipeline.take(ev.SendStore)
    pipeline.stored(ev.StoredRun(sent.position, 1, 0, 0, Refusal("STALE_STREAM", "epoch 4")), epoch=4)
    assert [effect.store for effect in pipeline.take(ev.Disconnect)] == [XIU]
    pipeline.now += mail.PAUSE_S
    pipeline.step(TICK)
    (again,) = pipeline.take(ev.SendStore)
    assert again.data == sent.data


def test_a_lost_pi_leader_ends_the_writers_that_wait_for_it_and_no_others() -> None:
    pipeline = Pipeline(pis=2)
    pipeline.step(ev.WriterOpened(2, 10, 71))
    pipeline.mail(record(1, 8), position=1)
    pipeline.mail(record(2, 9), position=1, stream=2)
    pipeline.store_all()
    sent = {each.partition: each for each in pipeline.take(ev.SendAppend)}
    assert set(sent) == {0, 1}
    pipeline.step(ev.LinkDown(PI, pipeline.links[PI], "gone"))
    assert [(end.stream, end.why.code) for end in pipeline.take(ev.EndWriter)] == [(1, "STALE_STREAM")]
    pipeline.appended(sent[1], [1])
    assert [result.code for result in pipeline.results(stream=2)] == [""]


@pytest.mark.parametrize(("code", "relinked"), [("NOT_LEADER", True), ("OUTCOME_UNKNOWN", True), ("OVERLOADED", False)])
def test_a_refusal_of_pi_ends_the_streams_that_it_was_for(code: str, relinked: bool) -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    pipeline.store_all()
    pipeline.appended(pipeline.one_append()[0], code=code)
    (end,) = pipeline.take(ev.EndWriter)
    assert (end.why.code, end.why.retry_after_ms) == (code, mail.RETRY_MS)
    assert bool(pipeline.take(ev.Disconnect)) is relinked
    assert not pipeline.results()
    assert pipeline.core.waiting_bytes == 0


def test_a_full_disk_of_pi_is_told_before_the_stream_ends() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    pipeline.mail(record(2, 7), position=2)
    pipeline.store_all()
    first = pipeline.take(ev.SendAppend)[0]
    pipeline.effects.clear()
    pipeline.appended(first, code="DISK_FULL")
    answer, end = (effect for effect in pipeline.effects if isinstance(effect, ev.Answer | ev.EndWriter))
    assert isinstance(answer, ev.Answer)
    assert [(result.position, result.code) for result in answer.results] == [(1, "DISK_FULL")]
    assert isinstance(end, ev.EndWriter)


def test_a_writer_that_opened_a_newer_stream_elsewhere_is_told() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    pipeline.store_all()
    pipeline.appended(pipeline.one_append()[0], [-1])
    assert [end.why.code for end in pipeline.take(ev.EndWriter)] == ["STALE_WRITER"]


def test_an_answer_without_results_from_another_epoch_confirms_nothing() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1, level=Level.PERSISTED)
    pipeline.store_all()
    pipeline.appended(pipeline.one_append()[0], [], epoch=4)
    assert not pipeline.results()
    assert [end.why.code for end in pipeline.take(ev.EndWriter)] == ["STALE_STREAM"]


@pytest.mark.parametrize(("result", "code"), [(-Code.INBOX_FULL, "INBOX_FULL"), (-Code.DISK_FULL, "DISK_FULL")])
def test_a_full_inbox_or_disk_refuses_its_own_mail_alone(result: int, code: str) -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), record(2, 8), record(3, 9), position=1)
    pipeline.store_all()
    pipeline.appended(pipeline.one_append()[0], [1, result, 1])
    assert [(each.position, each.count, each.code) for each in pipeline.results()] == [
        (1, 1, ""),
        (2, 1, code),
        (3, 1, ""),
    ]
    (grown,) = pipeline.take(ev.InboxesGrew)
    assert [(uin, seq, body) for uin, _, seq, _, body in grown.items()] == [(7, 1, record(1, 7)), (9, 1, record(3, 9))]


def test_many_receivers_share_one_body_and_are_told_of_together() -> None:
    pipeline = Pipeline(xius=2, pis=2)
    pipeline.mail(record(1, 7), position=1, m0=[8, 9, 8, 7])
    (sent,) = pipeline.take(ev.SendStore)
    assert (sent.partition, sent.count) == (1, 1)
    pipeline.stored(ev.StoredRun(sent.position, 1, 5, 0), partition=1)
    first, second = pipeline.take(ev.SendAppend)
    receivers = {}
    for each in (first, second):
        (operation,) = decode(each.operations)
        assert isinstance(operation, Fanout)
        assert operation.msg_id == msg_id(1, 64, 5)
        receivers[each.partition] = operation.receivers
    assert receivers == {1: (7).to_bytes(8, "little") + (9).to_bytes(8, "little"), 0: (8).to_bytes(8, "little")}
    pipeline.appended(first, [1] * (len(receivers[first.partition]) // 8))
    assert not pipeline.results()
    pipeline.appended(second, [1] * (len(receivers[second.partition]) // 8))
    assert [(result.position, result.code, result.copies) for result in pipeline.results()] == [(1, "", 2)]


def test_of_a_mail_to_many_that_some_did_not_get_the_open_inboxes_are_told() -> None:
    pipeline = Pipeline(pis=2)
    pipeline.mail(record(1, 7), position=1, m0=[8, 10])
    pipeline.store_all()
    sent = {each.partition: each for each in pipeline.take(ev.SendAppend)}
    pipeline.appended(sent[1], [1])
    pipeline.step(ev.LinkDown(PI, pipeline.links[PI], "gone"))
    (result,) = pipeline.results()
    assert (result.code, list(result.open)) == ("OUTCOME_UNKNOWN", [8, 10])
    assert [end.why.code for end in pipeline.take(ev.EndWriter)] == ["STALE_STREAM"]
    # The retry has a stream of its own, and fills them.
    pipeline.step(ev.WriterOpened(2, 9, 71))
    pipeline.up(PI)
    pipeline.mail(record(1, 7), position=1, stream=2, m0=[8, 10])
    pipeline.store_all()
    for each in pipeline.take(ev.SendAppend):
        pipeline.appended(each, [1] if each.partition else [1, 1])
    assert [result.code for result in pipeline.results(stream=2)] == [""]


def test_of_a_mail_to_many_the_full_inboxes_are_told() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1, m0=[8, 9])
    pipeline.store_all()
    pipeline.appended(pipeline.one_append()[0], [1, -2, 1])
    (result,) = pipeline.results()
    assert (result.code, list(result.open), result.msg_ids) == ("INBOX_FULL", [8], [msg_id(0, 64, 1)])
    assert pipeline.core.under_way == 0


def test_too_many_receivers_and_what_is_no_mail_are_refused_one_by_one() -> None:
    pipeline = Pipeline()
    wrong = [record(2, 7, kind=Kind.CHAT), record(3, 7, flags=Flag.TO_ROOM), encode(Kind.MAIL, 7, bytes(1 << 16), 4)]
    pipeline.mail(record(1, 7), *wrong, record(5, 7), position=1, m0=range(10, 1010))
    assert [(result.position, result.code) for result in pipeline.results()] == [
        (1, "TOO_MANY_RECEIVERS"), (2, "INVALID_ARGUMENT"), (3, "INVALID_ARGUMENT"), (4, "RECORD_TOO_LARGE"),
    ]  # fmt: skip
    (sent,) = pipeline.take(ev.SendStore)
    assert sent.data == record(5, 7)
    pipeline.mail(record(6, 7), position=6, m0=[MAX_ID + 1])
    assert [result.code for result in pipeline.results()] == ["INVALID_ARGUMENT"]


def test_one_inbox_gets_its_mail_in_order_whichever_xiu_answers_first() -> None:
    """User 8 gets the second mail by the Xiu of user 7, and waits for the first, which is stored later."""
    pipeline = Pipeline(xius=2)
    pipeline.mail(record(1, 8), position=1)
    pipeline.mail(record(2, 7), position=2, m0=[8])
    pipeline.mail(record(3, 9), position=3)
    pipeline.store_all(partition=1)
    assert not pipeline.take(ev.SendAppend)
    pipeline.store_all(partition=0)
    operations = [operation for each in pipeline.take(ev.SendAppend) for operation in decode(each.operations)]
    assert [type(operation) for operation in operations] == [Appends, Fanout, Appends]


def test_levels_keep_the_order_too() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    pipeline.mail(record(2, 7), position=2, level=Level.ACCEPTED)
    slow, quick = pipeline.take(ev.SendStore)
    pipeline.stored(ev.StoredRun(quick.position, 1, 2, 0))
    assert not pipeline.take(ev.SendAppend)
    pipeline.stored(ev.StoredRun(slow.position, 1, 1, 0))
    assert [each.level for each in pipeline.take(ev.SendAppend)] == [Level.REPLICATED, Level.ACCEPTED]


def test_what_comes_while_requests_are_under_way_leaves_together() -> None:
    pipeline = Pipeline()
    for number in range(1, 11):
        pipeline.mail(record(number, 7), position=number)
    sent = pipeline.take(ev.SendStore)
    assert [each.count for each in sent] == [1] * mail_requests.MAX_REQUESTS
    pipeline.stored(ev.StoredRun(sent[0].position, 1, 1, 0))
    assert [each.count for each in pipeline.take(ev.SendStore)] == [10 - mail_requests.MAX_REQUESTS]


def test_a_store_that_says_nothing_is_left_and_a_silent_pi_ends_its_writers() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    pipeline.now += mail_requests.STALL_S
    pipeline.step(TICK)
    assert [effect.store for effect in pipeline.take(ev.Disconnect)] == [XIU]
    pipeline.turn()
    pipeline.store_all()
    pipeline.take(ev.SendAppend)
    pipeline.core._timeout_s = 1000.0
    pipeline.now += mail_requests.STALL_S
    pipeline.step(TICK)
    assert [effect.store for effect in pipeline.take(ev.Disconnect)] == [PI]
    assert len(pipeline.take(ev.EndWriter)) == 1


def test_the_next_deadline_is_the_end_of_a_pause_a_stall_or_the_time_to_confirm() -> None:
    pipeline = Pipeline()
    assert pipeline.core.next_deadline() == NEVER
    pipeline.mail(record(1, 7), position=1)
    assert pipeline.core.next_deadline() == pipeline.now + mail_requests.STALL_S
    (sent,) = pipeline.take(ev.SendStore)
    pipeline.stored(ev.StoredRun(sent.position, 1, 0, 0, Refusal("OVERLOADED", "busy")))
    assert pipeline.core.next_deadline() == pipeline.now + mail.PAUSE_S
    pipeline.step(ev.LinkDown(XIU, pipeline.links[XIU], "gone"))
    pipeline.turn()
    assert pipeline.core.next_deadline() == pipeline.now + TIMEOUT_S, "nothing to send to, and nobody who owes an answer"
    pipeline.step(ev.WriterClosed(1))
    pipeline.turn()
    assert pipeline.core.next_deadline() == NEVER


def test_a_changed_layout_ends_every_stream() -> None:
    pipeline = Pipeline()
    pipeline.step(ev.WriterOpened(2, 10, 71))
    pipeline.step(ev.StoresChanged(1, 4))
    assert [(end.stream, end.why.code) for end in pipeline.take(ev.EndWriter)] == [(1, "STALE_STREAM"), (2, "STALE_STREAM")]


@pytest.mark.parametrize(("xius", "pis", "taken"), [(0, 1, True), (1, 0, True), (1, 1, False)])
def test_who_keeps_no_mail_says_so(xius: int, pis: int, taken: bool) -> None:
    pipeline = Pipeline(xius, pis, taken=taken)
    (end,) = pipeline.take(ev.EndWriter)
    assert end.why.code == "NOT_SERVED"
    assert ("proxy.kinds" if not taken else "pixiu up") in end.why.text
    pipeline.mail(record(1, 7), position=1)
    assert not pipeline.effects


@pytest.mark.parametrize(
    ("data", "count", "position", "code"),
    [
        (record(1, 7)[:-1], 1, 1, "MALFORMED"),
        (record(1, 7) + b"x", 1, 1, "MALFORMED"),
        (record(1, 7), 2, 1, "MALFORMED"),
        (record(1, 7), 1, 2, "INVALID_ARGUMENT"),
        (b"", mail.MAX_BATCH_RECORDS + 1, 1, "INVALID_ARGUMENT"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_read_ends_its_stream(data: bytes, count: int, position: int, code: str) -> None:
    pipeline = Pipeline()
    pipeline.step(ev.MailReceived(1, data, count, position, Level.REPLICATED, {}))
    assert [end.why.code for end in pipeline.take(ev.EndWriter)] == [code]
    assert pipeline.core.waiting_bytes == 0


def test_too_much_mail_ends_the_stream_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "MAX_WAITING_BYTES", 150)
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    pipeline.mail(*(record(number, 7) for number in range(2, 5)), position=2)
    (end,) = pipeline.take(ev.EndWriter)
    assert (end.why.code, end.why.retry_after_ms) == ("OVERLOADED", mail.RETRY_MS)


def test_mail_that_waits_for_one_partition_leaves_the_others_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "MAX_WAITING_BYTES", 4000)
    monkeypatch.setattr(mail, "MIN_SHARE_BYTES", 1000)
    pipeline = Pipeline(xius=4)
    for stream in range(2, 82):
        pipeline.step(ev.WriterOpened(stream, 9 + stream, 70))
        pipeline.mail(record(stream, 4), position=1, stream=stream)
    refused = pipeline.take(ev.EndWriter)
    assert {end.why.code for end in refused} == {"OVERLOADED"}
    assert "Xiu partition 0" in refused[0].why.text
    assert 900 < pipeline.core.waiting_bytes <= 1000
    pipeline.mail(record(1, 5), position=1)
    assert not pipeline.take(ev.EndWriter)
    pipeline.store_all()
    pipeline.step(ev.WriterClosed(2))
    pipeline.step(ev.WriterOpened(90, 90, 70))
    pipeline.mail(record(90, 4), position=1, stream=90)
    assert not pipeline.take(ev.EndWriter)


def test_a_mail_to_many_counts_where_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "MAX_WAITING_BYTES", 4000)
    monkeypatch.setattr(mail, "MIN_SHARE_BYTES", 100)
    pipeline = Pipeline(xius=2)
    pipeline.mail(record(1, 8), position=1, m0=[9, 10, 11])
    pipeline.store_all()
    pipeline.appended(pipeline.take(ev.SendAppend)[0], [1, 1, 1, 1])
    assert (pipeline.core.waiting_bytes, pipeline.core.under_way) == (0, 0)
    pipeline.mail(record(2, 8), position=2)
    assert not pipeline.take(ev.EndWriter)


def _answered(writers: int) -> int:
    """What a Pi's answer to so many writers costs."""
    pipeline = Pipeline()
    for stream in range(2, writers + 2):
        pipeline.step(ev.WriterOpened(stream, 9 + stream, 70))
        pipeline.step(ev.MailReceived(stream, record(stream, stream), 1, 1, Level.REPLICATED, {}))
    pipeline.turn()
    pipeline.store_all()
    sent = pipeline.take(ev.SendAppend)[-1]
    triple = Triple(1, 3, 60)
    answer = ev.Appended(0, pipeline.links[PI], sent.request, [1] * writers, None, triple, 2)
    cost = steps(lambda: pipeline.core.step(answer, pipeline.now))
    assert pipeline.core.waiting_bytes == 0
    return cost


def _ended(writers: int, how: str) -> int:
    """What the end of so many writers costs, each with mail that a silent Xiu does not take."""
    pipeline = Pipeline(linked=False)
    for stream in range(2, writers + 2):
        pipeline.step(ev.WriterOpened(stream, 9 + stream, 70))
        for position in range(1, 6):
            pipeline.step(ev.MailReceived(stream, record(stream, stream), 1, position, Level.REPLICATED, {}))
    pipeline.turn()
    pipeline.now += TIMEOUT_S + 1

    def close() -> None:
        for stream in range(2, writers + 2):
            pipeline.core.step(ev.WriterClosed(stream), pipeline.now)

    cost = steps(close if how == "closed" else lambda: pipeline.core.step(TICK, pipeline.now))
    assert (pipeline.core.waiting_bytes, pipeline.core.under_way) == (0, 0)
    pipeline.up(XIU)
    pipeline.turn()
    assert not pipeline.take(ev.SendStore)
    return cost


@pytest.mark.parametrize(
    "work", [_answered, lambda n: _ended(n, "late"), lambda n: _ended(n, "closed")], ids=["answered", "late", "closed"]
)
def test_twice_the_writers_are_twice_the_work(work: Callable[[int], int]) -> None:
    assert work(160) < 2.5 * work(80)


def test_a_writer_that_went_is_forgotten_and_late_answers_find_nobody() -> None:
    pipeline = Pipeline()
    pipeline.mail(record(1, 7), position=1)
    pipeline.step(ev.WriterClosed(1))
    assert (pipeline.core.under_way, pipeline.core.waiting_bytes, pipeline.core.writers) == (0, 0, 0)
    pipeline.store_all()
    assert not pipeline.take(ev.SendAppend)
    pipeline.step(ev.Stored(0, pipeline.links[XIU] + 7, [], Triple(1, 3, 1), 1))
    pipeline.step(ev.LinkDown(XIU, pipeline.links[XIU] + 7, "an old one"))
    pipeline.step(ev.WriterOpened(2, 9, 71))
    pipeline.mail(record(2, 7), position=1, stream=2)
    assert len(pipeline.take(ev.SendStore)) == 1


def test_every_code_that_a_sender_is_told_is_an_error_of_its_own() -> None:
    codes = {error.code for error in all_errors()}
    told = {"NOT_SERVED", "STALE_WRITER", "STALE_STREAM", "OUTCOME_UNKNOWN", "INBOX_FULL", "DISK_FULL", "OVERLOADED", "TOO_OLD"}
    assert told <= codes


def test_a_proxy_that_has_not_seen_the_cluster_yet_sends_writers_elsewhere_and_takes_them_later() -> None:
    core = MailCore(max_record_bytes=1 << 16, timeout_s=TIMEOUT_S)
    (refused,) = core.step(ev.WriterOpened(1, 9, 70), 100.0)
    assert isinstance(refused, ev.EndWriter)
    assert (refused.why.code, refused.why.retry_after_ms > 0) == (Unavailable.code, True), "a client gives up on NOT_SERVED"
    assert core.step(ev.StoresChanged(1, 1), 100.1) == []
    assert core.step(ev.WriterOpened(2, 9, 71), 100.2) == []
    assert core.writers == 1
