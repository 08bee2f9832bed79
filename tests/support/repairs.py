"""Damage of stores that nobody has open, and `pixiu repair`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import lmdb

from pi.inboxes.chunk import ENTRY, ENTRY_BYTES, Chunk
from pi.keys import CRC_BYTES, chunk_key
from pixiu.errors import StoreDamaged
from tests.support.forks import fork_pixiu
from tests.support.roles import Roles
from xiu.state.dedupe import Dedupe
from xiu.store.store import Store

STEP = 256
FLIPPED = 16


def flip(folder: Path) -> None:
    """One bit in the middle of the largest file of a store."""
    file = max(folder.glob("*.sst"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) * 2 // 5] ^= 1
    file.write_bytes(data)


def alter(folder: Path, uin: int, seq: int, *, right_crc: bool = True) -> None:
    """Another MsgID in one entry of a Pi that is not running, and the CRC that belongs to it or to the old one."""
    with lmdb.open(str(folder), map_size=1 << 30) as environment, environment.begin(write=True) as transaction:
        key = chunk_key(uin, 1, seq)
        value = transaction.get(key)
        assert value is not None
        chunk = Chunk.decode(seq, key, bytes(value))
        msg_id, at_s = chunk.at(seq)
        ENTRY.pack_into(chunk.entries, (seq - chunk.first) * ENTRY_BYTES, msg_id + 1, at_s)
        altered = chunk.encode(key)
        transaction.put(key, altered if right_crc else altered[:-CRC_BYTES] + bytes(value)[-CRC_BYTES:])


def unreadable(folder: Path, snowflakes: list[int]) -> list[bool]:
    """Of which SnowflakeIDs a store cannot say whether it has them; nobody has it open. Empty: it does not open."""
    found = []
    try:
        store = Store(folder)
    except StoreDamaged:
        return []
    for snowflake in snowflakes:
        try:
            Dedupe(store).find([(snowflake, False)], store.head.window())
            found.append(False)
        except StoreDamaged:
            found.append(True)
    store.close()
    return found


def damage_dedupe_window(folder: Path, records: list[bytes]) -> list[bytes]:
    """Flip bits until rows of the dedupe window cannot be read, and the store still opens; whose rows these are."""
    snowflakes = [int.from_bytes(record[16:24], "little") for record in records]
    for file in folder.glob("*.sst"):
        whole = file.read_bytes()
        for at in range(len(whole) - STEP, 0, -STEP):
            data = bytearray(whole)
            for offset in range(at, at + FLIPPED):
                data[offset] ^= 1
            file.write_bytes(data)
            bad = unreadable(folder, snowflakes)
            if any(bad):
                return [record for record, is_bad in zip(records, bad, strict=True) if is_bad]
            file.write_bytes(whole)
    raise AssertionError("no row of the dedupe window could be damaged")


async def repair(roles: Roles, *more: str) -> tuple[int, dict[str, Any]]:
    """`pixiu repair --json`."""
    arguments = ["repair", "--target", roles.target(), "--json", *more]
    done = await asyncio.to_thread(fork_pixiu, *arguments)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}
