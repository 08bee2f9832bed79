"""The bridge to NSQ: its commands and its verdicts; and how an nsqd that refuses a link is named, by a real one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.connector import DONE, Outcome, Verdict
from bridge.connectors.nsq import MAX_BODY, NsqSource, NsqSourceOptions, NsqTarget, NsqTargetOptions
from bridge.connectors.nsq_link import addresses_of
from bridge.repeats import Repeats
from cluster.nsq.frames import FrameReader, Got, Sent, frame, message_frames, message_of
from nsqdoor.protocol.commands import Parser, messages_of
from pixiu.errors import ConfigurationError, MalformedData, Unavailable
from tests.clients.matrix import certificates
from tests.support.nsqd import NSQD, Nsqd
from tests.support.waiting import until

real = pytest.mark.skipif(not NSQD.exists(), reason="no nsqd: python -m tests.clients.nsq.matrix --prepare --peer")


def item(**fields: Any) -> Any:
    return SimpleNamespace(**{"topic": "t", "key": None, "headers": {}, "body": b"x", **fields})


def to_nsq(**options: Any) -> NsqTargetOptions:
    return NsqTargetOptions(**{"kind": "to-nsq", "topic": "t", "nsqd": ("127.0.0.1:1",), **options})


def from_nsq(**options: Any) -> NsqSourceOptions:
    return NsqSourceOptions(**{"kind": "from-nsq", "topic": "t", "nsq_topic": "t", "nsqd": ("127.0.0.1:1",), **options})


def target(**options: Any) -> NsqTarget:
    return NsqTarget("b", to_nsq(**options))


def source(**options: Any) -> NsqSource:
    return NsqSource("b", from_nsq(**options))


def test_a_batch_is_an_mpub_for_each_topic_and_a_dpub_for_each_delayed_message() -> None:
    found = target(to="{key}", delay="{header:ms}")
    batch = [item(key=b"a", body=b"0"), item(key=b"b", body=b"1"), item(key=b"a", body=b"2"), item(key=b"a", headers={"ms": b"50"})]
    outcomes: list[Outcome | None] = [None] * 4
    chunks = found._chunks(batch, outcomes)
    parser = Parser(1 << 20, MAX_BODY)  # the listener's: both sides mean the same
    parser.feed(b"  V2" + b"".join(each.command for each in chunks))
    seen = []
    while (command := parser.next()) is not None:
        many = command.name == b"MPUB"
        seen.append((command.name, *command.words, *(messages_of(command.body, 100, 100) if many else [command.body])))
    assert seen == [(b"DPUB", b"a", b"50", b"x"), (b"MPUB", b"a", b"0", b"2"), (b"MPUB", b"b", b"1")]
    assert [list(each.places) for each in chunks] == [[3], [0, 2], [1]]
    assert outcomes == [None] * 4


def test_no_mpub_is_larger_than_nsqd_takes() -> None:
    chunks = target()._chunks([item(body=b"x" * (1 << 20))] * 9, [None] * 9)
    assert [list(each.places) for each in chunks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"key": b"a b"}, "no topic of NSQ"), ({"key": b"a" * 65}, "no topic of NSQ"), ({"key": b"k", "body": b""}, "without a body"),
     ({"key": b"k", "headers": {"ms": b"soon"}}, "no delay of NSQ"), ({"key": b"k", "headers": {"ms": b"3600001"}}, "no delay")],
)  # fmt: skip
def test_what_nsq_never_takes_is_told(fields: dict[str, Any], why: str) -> None:
    outcomes: list[Outcome | None] = [None]
    assert target(to="{key}", delay="{header:ms}")._chunks([item(**fields)], outcomes) == []
    assert outcomes[0] is not None
    assert (outcomes[0].verdict, why in outcomes[0].why) == (Verdict.NEVER, True)


def test_frames_are_the_same_whatever_the_cuts() -> None:
    sent = Sent(b"0123456789abcdef", 17, 3, b"body")
    stream = frame(0, b"OK") + message_frames([sent]) + frame(1, b"E_INVALID x")
    for cut in range(len(stream) + 1):
        reader = FrameReader()
        found = reader.feed(stream[:cut]) + reader.feed(stream[cut:])
        assert [kind for kind, _ in found] == [0, 2, 1]
        assert message_of(found[1][1]) == Got(17_000, 3, sent.id, b"body")
    for wrong in (b"HTTP/1.1 400", b"\0\0\0\1\0\0\0\0"):
        with pytest.raises(MalformedData):
            FrameReader().feed(wrong)


def test_the_oldest_ids_are_forgotten() -> None:
    found = Repeats(2)
    assert [found.note(each) for each in (b"a", b"b", b"a", b"c", b"d", b"a")] == [True, True, False, True, True, True]
    assert len(found) == 2


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [(to_nsq, {"nsqd": ()}, "lookupd"), (to_nsq, {"nsqd": ("nowhere",)}, "HOST:PORT"), (to_nsq, {"lookupd": ("h:1",)}, "either"),
     (from_nsq, {"nsq_topic": "a b"}, "name of NSQ"), (to_nsq, {"to": "{what}"}, "template")],
)  # fmt: skip
def test_wrong_options_are_named(kind: Any, options: dict[str, Any], why: str) -> None:
    assert any(why in said for _, said in kind(**options).problems())


async def test_an_nsqd_that_is_away_is_named() -> None:
    with pytest.raises(Unavailable, match=r"the nsqd at 127\.0\.0\.1:1 does not answer"):
        await target().open()
    with pytest.raises(Unavailable, match=r"the nsqlookupd at 127\.0\.0\.1:1 does not answer"):
        await source(nsqd=(), lookupd=("127.0.0.1:1",)).open()


@pytest.mark.process
@real
async def test_tls_and_logins_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    ca, cert, key = map(str, certificates(tmp_path))
    (tmp_path / "secret").write_text("wrong")
    tls = ("-tls-cert", cert, "-tls-key", key, "-tls-required=tcp-https", "-max-msg-size", "1000")
    async with Nsqd(tmp_path, *tls) as nsqd:
        where = {"nsqd": (nsqd.address,)}
        with pytest.raises(ConfigurationError, match="requires TLS: give tls_ca"):
            await source(**where).open()
        with pytest.raises(ConfigurationError, match="requires TLS: give tls_ca"):
            await target(**where).write([item()])
        with pytest.raises(ConfigurationError, match="check tls_ca"):
            await target(**where, tls_ca="system").open()
        found = target(**where, tls_ca=ca)
        # Nothing of an MPUB with a message that is too large is stored: its halves are tried, and it alone is a dead letter.
        outcomes = await found.write([item(), item(body=b"x" * 2000), item(topic="u"), item(body=b"")])
        assert [each.verdict for each in outcomes] == [Verdict.SPLIT, Verdict.SPLIT, Verdict.DONE, Verdict.NEVER]
        assert "MPUB message too big 2000 > 1000" in outcomes[1].why
        assert await found.write([item(), item()]) == [DONE, DONE]
        await found.close()
        reads = source(**where, tls_ca=ca)
        await reads.open()
        first = await reads.read()
        assert [each.body for each in first] == [b"x"] * len(first) != []
        await reads.close()
    with pytest.raises(ConfigurationError, match="has no TLS: leave tls_ca out"):
        async with Nsqd(tmp_path) as nsqd:
            await target(nsqd=(nsqd.address,), tls_ca="system").open()
    async with Nsqd(tmp_path, "-auth-http-address", "127.0.0.1:1") as nsqd:
        with pytest.raises(ConfigurationError, match="requires a login: give secret_file"):
            await target(nsqd=(nsqd.address,)).open()
        with pytest.raises(ConfigurationError, match="refuses the login: E_AUTH_FAILED"):
            await target(nsqd=(nsqd.address,), secret_file=str(tmp_path / "secret")).open()


@pytest.mark.process
@real
async def test_what_waits_is_touched_and_what_is_not_finished_comes_again_with_its_id(tmp_path: Path) -> None:
    nsqd = Nsqd(tmp_path)
    await nsqd.with_lookupd()
    async with nsqd:
        writes = target(nsqd=(nsqd.address,))
        assert await writes.write([item(body=b"%d" % number) for number in range(3)]) == [DONE] * 3
        options = {"nsqd": (), "lookupd": (nsqd.lookupd,), "msg_timeout_s": 1}
        first = source(**options)

        async def registered() -> bool:
            return bool(await addresses_of(first._options, "t"))

        await until(registered, "nsqlookupd knows the topic")
        await first.open()
        found = list(await first.read())
        while len(found) < 3:
            found += await first.read()
        for _ in range(2):  # each read waits for a second, so the messages' time is over twice
            assert await first.read() == []
        await first.confirm(found[:1])
        await first.close()
        second = source(**options)
        await second.open()
        again = list(await second.read())
        while len(again) < 2:
            again += await second.read()
        assert {each.headers["nsq_id"] for each in again} == {each.headers["nsq_id"] for each in found[1:]}
        assert [each.headers["nsq_attempts"] for each in again] == [b"2"] * 2
        assert [each.event_time_us for each in found] == sorted(each.event_time_us or 0 for each in found)
        await second.close()
        await writes.close()
