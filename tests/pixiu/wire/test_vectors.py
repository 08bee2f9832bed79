"""`proto/vectors.json`, for clients in other languages: up to date, and what the product's codec and docs/protocol.md say."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from pixiu.ids import snowflake_time_ms, snowflake_worker
from pixiu.placement.partition import serves
from pixiu.placement.slots import slot_of
from pixiu.wire import envelope, record
from scripts.test_vectors import PLACE, ROOT, vectors

FOUND: dict[str, Any] = json.loads((ROOT / PLACE).read_text())
PROTOS = sorted((ROOT / "proto/pixiu").rglob("*.proto"))


def test_the_vectors_are_up_to_date() -> None:
    assert vectors() == FOUND, "python scripts/test_vectors.py"


@pytest.mark.parametrize("vector", FOUND["records"], ids=lambda vector: vector["name"])
def test_the_codec_reads_each_record(vector: dict[str, Any]) -> None:
    made = record.decode(bytes.fromhex(vector["record"]))
    assert (made.kind, made.flags, made.type, made.lifetime_min) == tuple(
        vector[name] for name in ("kind", "flags", "type", "lifetime_min")
    )
    assert (made.snowflake_id, made.key, made.sender) == tuple(int(vector[name]) for name in ("snowflake_id", "key", "sender"))
    assert (made.extension.hex(), made.body.hex(), made.crc) == (vector["extension"], vector["body"], vector["crc"])
    assert [[str(number) for number in stamp] for stamp in made.stamps] == vector["stamps"]


@pytest.mark.parametrize("vector", FOUND["records"], ids=lambda vector: vector["name"])
def test_the_page_of_the_protocol_is_enough_to_make_each_record(vector: dict[str, Any]) -> None:
    """By the table in docs/protocol.md, without the product's code."""
    extension, body = bytes.fromhex(vector["extension"]), bytes.fromhex(vector["body"])
    trailer = b"".join(struct.pack("<BBHIQQ", *map(int, stamp)) for stamp in vector["stamps"])
    trailer += bytes([len(vector["stamps"])]) if vector["flags"] & 1 else b""
    rest = extension + body + trailer
    head = struct.pack(
        "<BBBBHH", vector["kind"], vector["flags"], vector["type"], bool(extension), len(extension), vector["lifetime_min"]
    )
    head += struct.pack("<I", zlib.crc32(extension + body))
    head += struct.pack("<QQQ", *(int(vector[name]) for name in ("snowflake_id", "key", "sender")))
    assert (struct.pack("<I", len(head) + len(rest)) + head + rest).hex() == vector["record"]


def test_the_batch_is_its_records_end_to_end() -> None:
    batch = FOUND["batch"]
    by_name = {vector["name"]: vector["record"] for vector in FOUND["records"]}
    assert [part.hex() for part in record.split(bytes.fromhex(batch["bytes"]), batch["count"])] == [
        by_name[name] for name in batch["names"]
    ]


@pytest.mark.parametrize("vector", FOUND["blocks"], ids=lambda vector: vector["name"])
def test_the_page_of_topics_is_enough_to_make_each_block(vector: dict[str, Any]) -> None:
    """By the tables in docs/topics.md, without the product's code."""
    index = body = b""
    joined = 0
    for message in vector["messages"]:
        key, tag, flags, data = message["key"], message["tag"], int(message["load_test"]), b""
        for name, flag, form in (("event_at_us", 64, "<Q"), ("deliver_at_us", 4, "<Q"), ("expires_in_s", 8, "<I")):
            if message[name] is not None:
                flags, data = flags | flag, data + struct.pack(form, int(message[name]))
        if tag is not None:
            flags, data = flags | 2, data + bytes([len(tag)]) + tag.encode()
        if key is not None:
            flags, data = flags | 16, data + struct.pack("<H", len(key) // 2) + bytes.fromhex(key)
        if message["headers"]:
            flags, data = flags | 32, data + bytes([len(message["headers"])])
            for name, value in message["headers"]:
                data += struct.pack("<BH", len(name), len(value) // 2) + name.encode() + bytes.fromhex(value)
        body += data + bytes.fromhex(message["body"])
        joined |= flags
        index += struct.pack("<IHBB", len(body), message["slot"], flags, 0)
    rest = struct.pack("<IIIQQQ", vector["topic"], vector["part"], len(vector["messages"]), *(
        int(vector[name]) for name in ("writer", "first", "progress")
    )) + index + body  # fmt: skip
    made = struct.pack("<2sBBII", b"PB", 1, joined, 12 + len(rest), zlib.crc32(rest)) + rest
    assert made.hex() == vector["block"]
    stamp = struct.pack("<QQQ", 4096, 1_750_000_000_000_000, 7)
    crc = zlib.crc32(stamp + made[8:12])
    assert (struct.pack("<II", len(made), crc) + stamp + made).hex() == vector["stored_at_4096"]


def test_ids_partitions_and_envelopes_are_the_products() -> None:
    for vector in FOUND["snowflake_ids"]:
        number = int(vector["id"])
        assert (str(snowflake_time_ms(number)), snowflake_worker(number), number & 1023) == (
            vector["time_ms"], vector["worker"], vector["sequence"],
        )  # fmt: skip
    for vector in FOUND["partitions"]:
        served = [partition for partition in range(vector["n"]) if serves(partition, int(vector["key"]), vector["n"])]
        assert served == [vector["partition"]]
    for vector in FOUND["slots"]:
        assert slot_of(bytes.fromhex(vector["key"])) == vector["slot"]
    for vector in FOUND["envelopes"]:
        (found,) = envelope.split(bytes.fromhex(vector["bytes"]), 1)
        assert (str(found.msg_id), str(found.seq), str(found.uin)) == (vector["msg_id"], vector["seq"], vector["uin"])
        assert (found.session, found.device, found.lane, found.flags) == tuple(
            vector[name] for name in ("session", "device", "lane", "flags")
        )


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_every_proto_of_clients_names_its_package_in_other_languages(path: Path) -> None:
    text = path.read_text()
    for option in (
        'go_package = "pixiu/wire/v1;wirev1"',
        'java_package = "pixiu.wire.v1"',
        "java_multiple_files = true",
        'csharp_namespace = "Pixiu.Wire.V1"',
    ):
        assert f"option {option};" in text
