"""NSQ's protocol as texts: what a client says, what it is answered, and what the listener does.

> WORDS           a command; ` + TEXT` at its end is a body
>> TEXT           bytes as they are, with \\n and \\x00
stored, joined …  how something went
message …         from the channel: part:offset attempts body
after SECONDS     time passes
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cluster.nsq.frames import MAGIC, Sent, frame, message_id, position_of
from nsqdoor.protocol.commands import Refused
from nsqdoor.protocol.events import (
    Authenticate,
    Close,
    Credit,
    Effect,
    Finish,
    Limits,
    Publish,
    Requeue,
    StartDeflate,
    StartTls,
    Subscribe,
    Touch,
    Write,
)
from nsqdoor.protocol.session import OK_FRAME, Session
from tests.support.transcript import check

HERE = Path(__file__).resolve().parent / "transcripts"
KINDS = ("", "error ", "message ")
LIMITS = Limits(
    version="test", max_message=100, max_body=1_000, max_rdy=10, max_publishes=3, heartbeat_ms=30_000, max_delay_ms=60_000,
    tls=True, auth=True,
)  # fmt: skip


class Player:
    """Plays a transcript."""

    def __init__(self) -> None:
        self.now = 0.0
        self.session = Session(LIMITS, 0.0)
        self.pending: list[Publish] = []
        self._buffer = b""

    def do(self, command: str) -> Iterable[str]:
        """Carry out a line."""
        word, _, rest = command.partition(" ")
        return list(self._said(self._step(word, rest)))

    def _step(self, word: str, rest: str) -> list[Effect]:
        session, now = self.session, self.now
        if word == "connect":
            flags = dict.fromkeys(rest.split(), True)
            self.session = Session(Limits(**{**LIMITS.__dict__, **flags}), now)
            self.pending = []
            return self.session.receive(MAGIC, now)
        if word == ">":
            line, plus, body = rest.partition(" + ")
            data = line.encode() + b"\n"
            return session.receive(data + _sized(body.encode()) if plus else data, now)
        if word == ">>":
            return session.receive(rest.encode().decode("unicode_escape").encode("latin-1"), now)
        if word in ("stored", "failed"):
            return session.published([(self.pending.pop(0), Refused(*rest.split(" ", 1)) if rest else None)], now)
        if word in ("joined", "left"):
            return session.subscribed(Refused(*rest.split(" ", 1)) if rest else None, now)
        if word == "login":
            return session.authenticated("" if rest == "taken" else None, now)
        if word == "secured":
            return session.secured(now)
        if word == "message":
            place, attempts, body = rest.split(" ", 2)
            body, _, extension = body.partition(" with ")
            part, offset = map(int, place.split(":"))
            own = extension.encode() if extension else b"" if session.terms.extended else None
            return session.deliver([Sent(message_id(part, offset), 1_000_000, int(attempts), body.encode(), own)], now)
        assert word == "after", word
        self.now += float(rest)
        return session.tick(self.now) if session.next_deadline() <= self.now else []

    def _said(self, effects: list[Effect]) -> Iterator[str]:
        for effect in effects:
            if isinstance(effect, Write):
                yield from self._frames(effect.data)
            elif isinstance(effect, Publish):
                self.pending.append(effect)
                bodies = " ".join(body.decode() for body in effect.bodies)
                extra = [f"delay={effect.delay_ms}"] if effect.delay_ms else []
                extra += [f"{name}={value.decode()}" for each in effect.headers for name, value in each.values.items()]
                extra += [f"tag={each.tag}" for each in effect.headers if each.tag] + [
                    "load test" for each in effect.headers if each.load_test
                ]
                yield " ".join(("publish", effect.topic, bodies, *extra))
            elif isinstance(effect, Subscribe):
                more = [effect.tag, json.dumps(effect.filter) if effect.filter else "", "with headers" if effect.extended else ""]
                yield " ".join(each for each in ("join", effect.topic, effect.channel, *more) if each)
            elif isinstance(effect, Finish):
                yield "finish " + " ".join(":".join(map(str, position_of(each))) for each in effect.ids)
            elif isinstance(effect, Touch | Requeue):
                place = ":".join(map(str, position_of(effect.id)))
                name = type(effect).__name__.lower()
                yield f"{name} {place} {effect.delay_ms}" if isinstance(effect, Requeue) else f"{name} {place}"
            elif isinstance(effect, Credit):
                yield f"credit {effect.count}"
            elif isinstance(effect, Close):
                yield f"close: {effect.why}"
            elif isinstance(effect, Authenticate):
                yield f"check login {effect.secret}"
            elif isinstance(effect, StartDeflate):
                yield f"start deflate {effect.level}"
            else:
                assert isinstance(effect, StartTls)
                yield "start TLS"

    def _frames(self, data: bytes) -> Iterator[str]:
        while data:
            size, kind = struct.unpack_from(">ii", data)
            found, data = data[8 : 4 + size], data[4 + size :]
            if kind == 2:
                _, attempts, name = struct.unpack_from(">qH16s", found)
                yield f"< message {':'.join(map(str, position_of(name)))} {attempts} {found[26:]!r}"
            else:
                yield f"< {KINDS[kind]}{found.decode()}"


def _sized(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_a_transcript(path: Path) -> None:
    check(path, Player().do)


def test_who_has_not_logged_in_sends_a_few_kibibytes_at_most() -> None:
    limits = Limits(auth=True, auth_required=True)
    for name, size, code in (
        (b"MPUB orders", 4 << 20, b"E_AUTH_FIRST"),
        (b"IDENTIFY", 4 << 20, b"E_BAD_BODY"),
        (b"AUTH", 8_193, b"E_BAD_BODY"),
    ):
        session = Session(limits, 0.0)
        refused, over = session.receive(MAGIC + name + b"\n" + size.to_bytes(4, "big"), 0.0)  # and not one byte of the body
        assert isinstance(refused, Write)
        assert code in refused.data
        assert isinstance(over, Close)
    session = Session(limits, 0.0)
    session.receive(MAGIC + b"AUTH\n" + _sized(b"s" * 8_192), 0.0)
    session.authenticated("", 0.0)
    assert session.receive(b"MPUB orders\n" + (4 << 20).to_bytes(4, "big"), 0.0) == []


def test_commands_that_come_together_are_one_effect_and_answered_one_by_one() -> None:
    session = Session(Limits(), 0.0)
    (run,) = session.receive(MAGIC + b"".join(b"PUB orders\n" + _sized(b"%d" % number) for number in range(5)) + b"PUB ord", 0.0)
    assert isinstance(run, Publish)
    assert run.bodies == [b"0", b"1", b"2", b"3", b"4"]
    (other,) = session.receive(b"ers\n" + _sized(b"5") + b"FIN x\n", 0.0)
    assert isinstance(other, Publish)
    run.stored = 3  # the fourth failed: the connection ends with its answer
    written, over = session.published([(run, Refused("E_PUB_FAILED", "why"))], 0.0)
    assert isinstance(written, Write)
    assert written.data == OK_FRAME * 3 + frame(1, b"E_PUB_FAILED why")
    assert isinstance(over, Close)


def test_finishes_that_come_together_are_one_effect() -> None:
    session, ids = Session(Limits(), 0.0), [message_id(1, offset) for offset in range(6)]
    session.receive(MAGIC + b"SUB orders work\nRDY 4\n", 0.0)
    session.subscribed(None, 0.0)
    session.deliver([Sent(each, 1, 1, b"x") for each in ids], 0.0)
    said = b"".join(b"FIN " + each + b"\n" for each in (*ids[:3], ids[0], ids[3]))
    done, more, unknown = session.receive(said + b"FI", 0.0)
    assert isinstance(done, Finish)
    assert done.ids == ids[:4]
    assert isinstance(more, Write)
    assert ids[5] in more.data
    assert isinstance(unknown, Write)
    assert b"E_FIN_FAILED" in unknown.data
    (last,) = session.receive(b"N " + ids[4] + b"\n", 0.0)
    assert isinstance(last, Finish)
