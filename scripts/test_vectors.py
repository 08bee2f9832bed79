"""Write the test vectors for clients in other languages: what the product's own codec makes of given values.

python scripts/test_vectors.py           writes proto/vectors.json
python scripts/test_vectors.py --check   says whether it is up to date, exit code 1 when not
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cluster.mqtt.mail import packet_id_of
from pixiu.ids import device_of_name, snowflake, uin_of_name
from pixiu.placement.slots import slot_of
from pixiu.placement.topics import TopicRefusal, resolve, user_of_topic
from pixiu.wire import block, envelope
from pixiu.wire.record import STAMP, TYPE_NORMAL, Flag, Kind, encode, with_topic

ROOT = Path(__file__).resolve().parent.parent
PLACE = "proto/vectors.json"
ABOUT = (
    "Test vectors of docs/protocol.md, written by scripts/test_vectors.py. Numbers of 64 bits are decimal texts, because JSON's "
    "numbers lose them; bytes are hexadecimal."
)
SENT_MS = 1_750_000_000_000
LAST_MS = 1_577_836_800_000 + (1 << 41) - 1


def record(name: str, kind: Kind, key: int, body: bytes, sequence: int, **fields: Any) -> dict[str, Any]:
    """Make one record, with the fields that it is made of."""
    stamps: tuple[tuple[int, ...], ...] = fields.pop("stamps", ())
    snowflake_id = fields.pop("snowflake_id", snowflake(SENT_MS, 7, sequence))
    made = encode(kind, key, body, snowflake_id, **fields)
    if stamps:
        made = made[:-1] + b"".join(STAMP.pack(*stamp) for stamp in stamps) + bytes([len(stamps)])
        made = (len(made) - 4).to_bytes(4, "little") + made[4:]
    return {
        "name": name,
        "kind": int(kind),
        "flags": fields.get("flags", 0),
        "type": fields.get("type", TYPE_NORMAL),
        "lifetime_min": fields.get("lifetime_min", 0),
        "snowflake_id": str(snowflake_id),
        "key": str(key),
        "sender": str(fields.get("sender", 0)),
        "extension": fields.get("extension", b"").hex(),
        "body": body.hex(),
        "stamps": [[str(number) for number in stamp] for stamp in stamps],
        "crc": int.from_bytes(made[12:16], "little"),
        "record": made.hex(),
    }


def records() -> list[dict[str, Any]]:
    """Return records of each kind, and one for each feature that makes a record different."""
    topic = int(resolve("weather/shenzhen"))  # type: ignore[arg-type]  # a name that has a room
    stamp = (1, 0, 0, 5, 1_750_000_000_000_000, 1_750_000_000_000_020)
    return [
        record("room", Kind.ROOM, 42, b"hello", 0, flags=Flag.TO_ROOM),
        record("room, every field", Kind.ROOM, (1 << 62) - 1, "grüß".encode(), 1, flags=Flag.TO_ROOM, sender=(1 << 63) - 1,
               type=TYPE_NORMAL | 63, lifetime_min=65535, extension=b'{"a":1}'),
        record("room, first lane", Kind.ROOM, 42, b"urgent", 2, flags=Flag.TO_ROOM, type=0),
        record("room, empty", Kind.ROOM, 1, b"", 3, flags=Flag.TO_ROOM),
        record("topic", Kind.ROOM, topic, with_topic("weather/shenzhen", b"rain"), 4, flags=Flag.TO_ROOM | Flag.TOPIC),
        record("signal", Kind.SIGNAL, 42, b"go", 5, flags=Flag.TO_ROOM, sender=7),
        record("signal to a user", Kind.SIGNAL, 8, b"invited", 6, sender=7),
        record("chat", Kind.CHAT, 8, b"hello, eight", 7, sender=7),
        record("mail", Kind.MAIL, 8, b"kept for you", 8, sender=7, lifetime_min=1440),
        record("mail, first lane, extension", Kind.MAIL, 8, bytes(range(256)), 9, type=5, extension=b'{"subject":"x"}'),
        record("derived ID", Kind.MAIL, 8, b"from a query", 0, flags=Flag.DERIVED_ID, snowflake_id=0x1234_5678_9ABC_DEF0),
        record("traced", Kind.ROOM, 42, b"hello", 10, flags=Flag.TO_ROOM | Flag.TRACED, stamps=(stamp,)),
    ]  # fmt: skip


def topics() -> list[dict[str, Any]]:
    """Return MQTT topics: the room or user that each names, or neither."""
    names = ["room/1", "room/42", f"room/{(1 << 62) - 1}", f"room/{1 << 62}", "room/0", "room/042", "room/x", "user/7", "user/0"]
    names += [f"user/{(1 << 63) - 1}", f"user/{1 << 63}", "weather", "weather/shenzhen", "grüße/an/alle", "/", "$SYS/uptime", ""]
    found = []
    for name in names:
        room = resolve(name)
        user = user_of_topic(name)
        key = {} if isinstance(room, TopicRefusal) else {"room": str(room)}
        found.append({"topic": name, **(key if user is None else {"user": str(user)})})
    return found


def blocks() -> list[dict[str, Any]]:
    """Return blocks of topics, also as a leader stores them."""
    full = block.Message(
        b"paid", slot_of(b"order-1"), b"order-1", [("trace", b"\x01\x02")], SENT_MS * 1000, (SENT_MS + 500) * 1000, 60, "blue"
    )
    found = []
    for name, messages in (
        ("plain", [block.Message(b"hello", 5)]),
        ("every field", [full, full._replace(body=b"", load_test=True)]),
    ):
        made = block.encode(messages, topic=3, part=2, writer=(1 << 64) - 1, first=11, progress=70)
        found.append({
            "name": name, "topic": 3, "part": 2, "writer": str((1 << 64) - 1), "first": "11", "progress": "70", "block": made.hex(),
            "messages": [
                {
                    "body": each.body.hex(), "slot": each.slot, "key": each.key and each.key.hex(), "tag": each.tag,
                    "headers": [[key, value.hex()] for key, value in each.headers], "load_test": each.load_test,
                    "event_at_us": each.event_at_us and str(each.event_at_us), "expires_in_s": each.expires_in_s,
                    "deliver_at_us": each.deliver_at_us and str(each.deliver_at_us),
                }
                for each in messages
            ],
            "stored_at_4096": block.stamped(made, block.Stamp(4096, SENT_MS * 1000, 7)).hex(),
        })  # fmt: skip
    return found


def vectors() -> dict[str, Any]:
    """Return all vectors."""
    keys = [1, 42, 63, 64, 127, 128, 4711, (1 << 62) - 1, (1 << 63) - 1]
    counts = [1, 2, 8, 128]
    mail = bytes.fromhex(records()[8]["record"])
    fields = {"msg_id": 0x0140_0001_0000_002A, "seq": 41, "uin": 8, "session": 3, "device": 2, "lane": 1}
    return {
        "about": ABOUT,
        "records": records(),
        "batch": {"names": ["room", "chat"], "count": 2, "bytes": records()[0]["record"] + records()[7]["record"]},
        "snowflake_ids": [
            {"time_ms": str(ms), "worker": worker, "sequence": sequence, "id": str(snowflake(ms, worker, sequence))}
            for ms, worker, sequence in ((1_577_836_800_000, 0, 0), (SENT_MS, 7, 10), (LAST_MS, 4095, 1023))
        ],
        "mqtt_topics": topics(),
        "mqtt_user_names": [{"name": name, "uin": str(uin_of_name(name))} for name in ("7", "007", "0", "alice", "-1", "")],
        "mqtt_packet_ids": [
            {"lane": lane, "seq": str(seq), "packet_id": packet_id_of(lane, seq)}
            for lane, seq in ((0, 1), (1, 1), (1, 4_094), (1, 4_095), (3, 1 << 40))
        ],
        "device_names": [{"name": name, "device": str(device_of_name(name))} for name in ("phone", "phone:mine", "")],
        "partitions": [{"key": str(key), "n": n, "partition": key % n} for key in keys for n in counts],
        "slots": [{"key": key.hex(), "slot": slot_of(key)} for key in (b"", b"order-1", bytes(300))],
        "blocks": blocks(),
        "envelopes": [
            {**texts(fields), "flags": 0, "record": "mail", "bytes": envelope.encode(**fields, flags=0, record=mail).hex()},
            {**texts(fields), "flags": 1, "record": "", "bytes": envelope.encode(**fields, flags=1, record=b"").hex()},
        ],
    }


def texts(fields: dict[str, int]) -> dict[str, str | int]:
    """Return the fields with 64-bit numbers as text."""
    return {name: str(value) if name in ("msg_id", "seq", "uin") else value for name, value in fields.items()}


def main() -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the file is up to date")
    text, path = json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n", ROOT / PLACE
    if not parser.parse_args().check:
        path.write_text(text)
        return 0
    if path.exists() and path.read_text() == text:
        return 0
    print(f"{PLACE} is not up to date: python scripts/test_vectors.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
