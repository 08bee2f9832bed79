"""Operations of devices on their inboxes, as a Pi takes them: made here, read by `pi.operations`. Pure.

    ├── u8 ──┼─ u32 ─┼──────────────────────┤   little-endian
    │   op   │ size  │ body of `size` bytes │   3 acknowledges   n × (UIN u64 | device u16 | lane u8 | 0 u8 | session u32 |
                                                                       UpTo u64 | map u64)
                                                4 open sessions  n × (UIN u64 | device u16)
                                                5 add device     UIN u64 | client ID

Source: DESIGN sections 5 and 11 ("Pi").
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

MAX_OPERATIONS_BYTES: Final = 1 << 20
"""Of one request."""
MAX_READS: Final = 1000
"""Of one request."""
MAX_READ_ENTRIES: Final = 50_000
"""Of all reads of a request together; what is beyond is cut off by Pi without a word."""
_ACKNOWLEDGES: Final = 3
_OPEN_SESSIONS: Final = 4
_ADD_DEVICE: Final = 5
_HEAD: Final = struct.Struct("<BI")
_ACKNOWLEDGE: Final = struct.Struct("<QHBxIQQ")
_USER_DEVICE: Final = struct.Struct("<QH")
_UIN: Final = struct.Struct("<Q")


def encode_acknowledges(items: Iterable[tuple[int, int, int, int, int, int]]) -> bytes:
    """Cursors: (UIN, device, session, lane, UpTo, map) each."""
    body = b"".join([_ACKNOWLEDGE.pack(uin, device, lane, session, up, bits) for uin, device, session, lane, up, bits in items])
    return _HEAD.pack(_ACKNOWLEDGES, len(body)) + body


def encode_opens(items: Iterable[tuple[int, int]]) -> bytes:
    """New sessions of (UIN, device) each."""
    body = b"".join([_USER_DEVICE.pack(uin, device) for uin, device in items])
    return _HEAD.pack(_OPEN_SESSIONS, len(body)) + body


def encode_add_device(uin: int, client_id: bytes) -> bytes:
    """A number for a client ID of at most 128 bytes: the one that it has, if it has one."""
    return _HEAD.pack(_ADD_DEVICE, 8 + len(client_id)) + _UIN.pack(uin) + client_id
