"""A proxy's mail pipeline takes whatever comes: writers' bytes, and answers of stores that make no sense."""

from __future__ import annotations

import random

import pytest

from cluster.core.contract import END_OF_TURN, TICK
from pixiu.errors import Refusal
from pixiu.ids import MAX_ID, snowflake
from pixiu.wire.levels import Level, Triple
from pixiu.wire.record import Kind, encode
from proxy import mail_events as ev
from proxy.mail.pipeline import MailCore
from tests.support.corpus import seeds
from tests.support.effort import runs

SEEDS = max(runs("PIXIU_FUZZ_EXAMPLES", local=500, ci=2000) // 100, 5)
CODES = ("", "", "", "ID_REUSED", "OVERLOADED", "NOT_LEADER", "DISK_FULL", "STALE_WRITER", "nonsense")


def batch(chance: random.Random) -> tuple[bytes, int]:
    """A batch that is often damaged, and a count that is often wrong."""
    count = chance.randrange(1, 5)
    data = bytearray(
        b"".join(
            encode(Kind.MAIL, chance.choice((1, 2, 3, MAX_ID)), b"x" * chance.randrange(30), snowflake(1_750_000_000_000, 1, n))
            for n in range(count)
        )
    )
    for _ in range(chance.choice((0, 0, 0, 1, 3))):
        data[chance.randrange(len(data))] = chance.randrange(256)
    end = len(data) if chance.random() < 0.8 else chance.randrange(len(data))
    return bytes(data[:end]), count + (chance.random() < 0.2)


class Stranger:
    """Somebody who writes, and stores that answer as they please."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.core = MailCore(max_record_bytes=1 << 16, timeout_s=2.0)
        self.now, self.links, self.streams, self.ended = 0.0, 0, 0, 0
        self.positions: dict[int, int] = {}
        self.sent: list[ev.SendStore | ev.SendAppend] = []
        self.step(ev.StoresChanged(2, 2))

    def step(self, event: ev.Event) -> None:
        """One event; what it asks for is done sooner or later, or never."""
        for effect in self.core.step(event, self.now):
            if isinstance(effect, ev.SendStore | ev.SendAppend):
                self.sent.append(effect)
            elif isinstance(effect, ev.Connect | ev.Disconnect):
                self.links += 1
                self.step(ev.LinkUp(effect.store, self.links, 3))
            elif isinstance(effect, ev.EndWriter):
                self.ended += 1
                self.positions.pop(effect.stream, None)

    def write(self, data: bytes, count: int, level: Level) -> None:
        """A writer of its own sends one batch."""
        self.streams += 1
        self.positions[self.streams] = 1 + count
        self.step(ev.WriterOpened(self.streams, 0, self.streams))
        self.step(ev.MailReceived(self.streams, data, count, 1, level, {}))

    def one(self) -> None:
        """Something happens."""
        chance = self.chance
        self.now += chance.random() * 0.1
        what = chance.randrange(8)
        if what == 0 or not self.positions:
            self.streams += 1
            self.positions[self.streams] = 1
            self.step(ev.WriterOpened(self.streams, chance.randrange(4), self.streams))
        elif what <= 3:
            stream = chance.choice(list(self.positions))
            data, count = batch(chance)
            position = self.positions[stream] + (chance.random() < 0.02)
            self.positions[stream] += count
            more = {chance.randrange(4): [chance.choice((0, 1, 5, MAX_ID + 9)) for _ in range(chance.randrange(3))]}
            self.step(ev.MailReceived(stream, data, count, position, Level(chance.randrange(3)), more))
        elif what <= 5 and self.sent:
            self.answer(self.sent.pop(chance.randrange(len(self.sent))))
        elif what == 6:
            self.step(END_OF_TURN if chance.random() < 0.8 else TICK)
        elif chance.random() < 0.2:
            stream = chance.choice(list(self.positions))
            del self.positions[stream]
            self.step(ev.WriterClosed(stream))

    def answer(self, sent: ev.SendStore | ev.SendAppend) -> None:
        """A store answers, rightly or not."""
        chance, triple = self.chance, Triple(1, self.chance.choice((3, 3, 3, 3, 4)), 9)
        code = chance.choice(CODES)
        refusal = Refusal(code, "x", chance.choice((0, 100, 1 << 31))) if code else None
        if isinstance(sent, ev.SendStore):
            runs = [
                ev.StoredRun(
                    sent.position + chance.choice((0, 0, 0, 1, 70)), chance.choice((sent.count, 1, 1 << 20)), chance.choice((1, 5)),
                    chance.choice((0, 0, 77)), refusal,
                )
                for _ in range(chance.choice((1, 1, 2)))
            ]  # fmt: skip
            self.step(ev.Stored(sent.partition, sent.link, runs, triple, 2))
        else:
            some = (1, 2, 3, -1, -2, -8)
            results = [chance.choice(some) if chance.random() < 0.1 else 1 for _ in range(chance.choice((1, 2, 4, 9)))]
            self.step(ev.Appended(sent.partition, sent.link, sent.request, results, refusal, triple, 2))
        if chance.random() < 0.05:
            self.step(ev.LinkDown(ev.Store(isinstance(sent, ev.SendAppend), sent.partition), sent.link, "x"))


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_raises_and_nothing_is_kept_for_ever(seed: int) -> None:
    stranger = Stranger(seed)
    for first in seeds("mail"):
        for level in Level:
            stranger.write(first.data, first.count, level)
    for _ in range(1500):
        stranger.one()
    assert stranger.core.counters.mails_in > 500
    assert stranger.core.counters.confirmed + stranger.core.counters.refused > 50
    assert stranger.ended > 10
    stranger.now += 60
    stranger.step(TICK)
    stranger.now += 60
    stranger.step(TICK)
    assert (stranger.core.under_way, stranger.core.waiting_bytes) == (0, 0)
