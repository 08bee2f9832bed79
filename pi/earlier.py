"""What an earlier form of the state is made into, once, when it is opened: entries had a value each, and an index. Blocking.

    E | UIN u64 | lane u8 | InboxSeq u64     MsgID u64 | appended at u32
    I | UIN u64 | lane u8 | MsgID u64        InboxSeq u64

A process that is killed meanwhile goes on where it was: a transaction takes entries away as it puts them into chunks, and the
first one says that the state has the new form, which the earlier program refuses.

Source: docs/decisions/0283-inboxes-are-stored-in-chunks.md.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from pi.chunk import ENTRY, Chunk
from pi.keys import CHUNK_KEY, META_KEY, META_VERSION, chunk_key, seal, unseal
from pi.store import StateStore
from pi.unwritten import Changes
from pixiu.errors import StateDamaged, Unavailable
from pixiu.wire.inbox_operations import U64

FORM: Final = 1
ENTRIES: Final = b"E"
INDEX: Final = b"I"
ROWS: Final = 20_000
"""Of one transaction."""


def check_form(form: int) -> None:
    """Another process's rows are as it stores them: taken from, or compared with, one of the same form only. Raises Unavailable."""
    if form != META_VERSION:
        raise Unavailable(
            f"the other process keeps inboxes in form {form}, this one in form {META_VERSION}; retry when both run one release"
        )


def convert(store: StateStore) -> int:
    """Put what has the earlier form into the present one; how many entries that were. Raises StateDamaged, DiskFull, DiskFailed."""
    entries = 0
    while changes := _form(store) | _some(store):
        entries += sum(key[:1] == ENTRIES for key in changes)
        store.write(changes)
        store.renew()
    return entries


def _form(store: StateStore) -> Changes:
    value = store.get(META_KEY)
    if value is None:
        return {}
    body = unseal(META_KEY, value)
    return {META_KEY: seal(META_KEY, bytes((META_VERSION,)) + body[1:] + bytes(U64.size))} if body[0] == FORM else {}


def _some(store: StateStore) -> Changes:
    """Some entries put into chunks; when there are no more, what is left of the index."""
    changes: Changes = {}
    chunks: dict[bytes, Chunk] = {}
    for key, value in islice(store.scan(ENTRIES, bytes((ENTRIES[0] + 1,))), ROWS):
        _, uin, lane, seq = CHUNK_KEY.unpack(key)
        place = chunk_key(uin, lane, seq)
        chunk = chunks.get(place)
        if chunk is None:
            begun = store.get(place)
            chunk = chunks[place] = Chunk(seq) if begun is None else Chunk.decode(seq, place, begun)
        changes[key] = None
        msg_id = _take(chunk, key, value, seq)
        changes[CHUNK_KEY.pack(INDEX, uin, lane, msg_id)] = None
    changes.update({place: chunk.encode(place) for place, chunk in chunks.items()})
    return changes or {key: None for key, _ in islice(store.scan(INDEX, bytes((INDEX[0] + 1,))), ROWS)}


def _take(chunk: Chunk, key: bytes, value: bytes, seq: int) -> int:
    """Put an entry into its chunk; its MsgID. What cannot be read makes the chunk one that is found broken, as the entry was."""
    try:
        msg_id, at_s = ENTRY.unpack(unseal(key, value))
    except StateDamaged as damage:
        chunk.damage = str(damage)
        return 0
    if seq != chunk.last + 1:
        chunk.damage = f"entry {seq} does not follow"
    chunk.append(msg_id, at_s)
    return int(msg_id)
