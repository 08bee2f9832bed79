"""Makes `tools/replay/data/sample_chat.jsonl.gz`: a small chat log with the skew of real chat, of made-up words.

Rooms and users follow Zipf's law; messages come in bursts; text lengths are log-normal (50 % below about 46 bytes,
99 % below about 600: as measured in 211 038 real chat messages); several alphabets. The same seed makes the same
log on every machine. Run: python scripts/make_sample.py
"""

from __future__ import annotations

import gzip
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

SEED: Final = 20160302
LINES: Final = 3_000
ROOMS: Final = 40
USERS: Final = 150
START_MS: Final = 1_700_000_000_000
SPAN_MS: Final = 50 * 60 * 1000
LENGTH_P50_BYTES: Final = 46
LENGTH_SIGMA: Final = math.log(600 / LENGTH_P50_BYTES) / 2.326
LONGEST_BYTES: Final = 2_000
ZIPF: Final = 1.05
SILENT_ROOM_EVERY: Final = 4
"""Interval of rooms without joins and parts in the log, as in some archives."""
TARGET: Final = Path(__file__).resolve().parent.parent / "tools" / "replay" / "data" / "sample_chat.jsonl.gz"

ALPHABETS: Final[tuple[tuple[str, str], ...]] = (
    ("bdfgklmnprstvz", "aeiou"),
    ("bdfgklmnprstvz", "aeiou"),
    ("bdfgklmnprstvz", "aeiou"),
    ("бвгджзклмнпрстх", "аеиоуяю"),
    ("βγδζθκλμνπρστφ", "αεηιοω"),
    ("čďhjklmňprřsštž", "aáeéiíou"),
    ("בגדהזחטכלמנ", "אוי"),
    ("بتجدرزسشفقكلمن", "اوي"),
    ("कगचजटडतदनपबमरलस", "ािीुे"),
    ("가나다라마바사아자차", "은는이가도"),
    ("さしたちなにはひまみ", "あいうえお"),
    ("海山水火木金土日月星", "人大小上下"),
)
MARKS: Final = ("", "", "", "", ".", ".", "?", "!", " :)", " …", " 🙂")


def _weights(count: int) -> list[float]:
    total, found = 0.0, []
    for rank in range(1, count + 1):
        total += rank**-ZIPF
        found.append(total)
    return [weight / total for weight in found]


def _pick(random: Random, cumulative: Sequence[float]) -> int:
    value = random.random()
    for index, weight in enumerate(cumulative):
        if value < weight:
            return index
    return len(cumulative) - 1


def _word(random: Random, alphabet: tuple[str, str]) -> str:
    consonants, vowels = alphabet
    syllables = 1 + int(random.random() * 3)
    return "".join(
        consonants[int(random.random() * len(consonants))] + vowels[int(random.random() * len(vowels))] for _ in range(syllables)
    )


def _normal(random: Random) -> float:
    # Twelve uniform values: no library function whose last bit could differ between machines.
    return sum(random.random() for _ in range(12)) - 6.0


def _text(random: Random, words: Sequence[str]) -> str:
    wanted = min(LONGEST_BYTES, max(2, int(LENGTH_P50_BYTES * math.exp(LENGTH_SIGMA * _normal(random)))))
    text = ""
    while len(text.encode()) + 6 < wanted:
        text += (" " if text else "") + words[int(random.random() ** 2 * len(words))]
    return text + MARKS[int(random.random() * len(MARKS))]


class _Room:
    """A room's people: its usual speakers, and those present now."""

    def __init__(self, random: Random, rank: int, users: Sequence[str]) -> None:
        size = max(3, int(len(users) * 0.5 / (rank + 1) ** 0.6))
        start = int(random.random() * len(users))
        # Talkative people (the first of the list) are in many rooms.
        self.people = list(dict.fromkeys([*users[: 2 + size // 4], *(users[(start + i * 7) % len(users)] for i in range(size))]))
        self.cumulative = _weights(len(self.people))
        alphabet = ALPHABETS[(rank * 5) % len(ALPHABETS)]
        self.words = list(dict.fromkeys(_word(random, alphabet) for _ in range(300)))
        self.name = f"{_word(random, ALPHABETS[0])}-{rank:02d}"
        self.present: list[str] = []
        self.silent = rank % SILENT_ROOM_EVERY == SILENT_ROOM_EVERY - 1


def _events(random: Random, room: _Room, ts_ms: int) -> list[dict[str, object]]:
    """Return the events in a room at one moment: mostly a message, at times preceded by a join or followed by a part or nick."""
    user = room.people[_pick(random, room.cumulative)]
    found: list[dict[str, object]] = []

    def add(kind: str, who: str, **fields: object) -> None:
        found.append({"ts_ms": ts_ms + len(found), "room": room.name, "kind": kind, "user": who, **fields})

    if user not in room.present:
        # One user in eight speaks without a join in the log, as in real archives.
        if not room.silent and random.random() < 0.875:
            add("join", user)
        room.present.append(user)
    add("action" if random.random() < 0.02 else "msg", user, text=_text(random, room.words))
    if room.silent or len(room.present) < 4:
        return found
    chance = random.random()
    if chance < 0.04:
        gone = room.present.pop(int(random.random() * len(room.present)))
        add("part", gone)
    elif chance < 0.05:
        position = int(random.random() * len(room.present))
        old = room.present[position]
        new = old[:-1] if old.endswith("_") else old + "_"
        if new not in room.present:
            room.present[position] = new
            add("nick", old, to=new)
    return found


def make_events(seed: int = SEED, lines: int = LINES) -> list[dict[str, object]]:
    """Return the sample's lines in order of time: `{ts_ms, room, kind, user, text?, to?}`."""
    random = Random(seed)
    users = list(dict.fromkeys(_word(random, ALPHABETS[0]) + _word(random, ALPHABETS[0]) for _ in range(USERS * 3)))[: USERS - 10]
    rooms = [_Room(random, rank, users) for rank in range(ROOMS)]
    cumulative = _weights(ROOMS)
    found: list[dict[str, object]] = []
    ts_ms = START_MS
    step = SPAN_MS / lines
    # Every room has at least one message; the rest comes in bursts of one room.
    waiting = list(rooms)
    while len(found) < lines:
        room = waiting.pop() if waiting and random.random() < 0.1 else rooms[_pick(random, cumulative)]
        burst = 1 + int(random.random() ** 3 * 12)
        for _ in range(burst):
            found.extend(_events(random, room, ts_ms))
            ts_ms = int(found[-1]["ts_ms"]) + 1 + int(step * 0.4 * random.random())  # type: ignore[call-overload]
        ts_ms += int(step * burst * 1.6 * random.random())
    return found[:lines]


def make_sample(seed: int = SEED, lines: int = LINES) -> bytes:
    """Return the log's text: JSON lines, UTF-8."""
    rows = make_events(seed, lines)
    return "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows).encode()


def main() -> int:
    """Write the file that is part of the distribution."""
    packed = io.BytesIO()
    # No name and no time in the header: the file is the same whenever it is made.
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=9, mtime=0) as out:
        out.write(make_sample())
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_bytes(packed.getvalue())
    sys.stdout.write(f"{TARGET.name}: {LINES} lines, {len(packed.getvalue())} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
