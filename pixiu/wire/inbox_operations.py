"""Operations of devices on their inboxes, as a Pi takes them: made here, read by `pi.operations`. Pure.

    ├── u8 ──┼─ u32 ─┼──────────────────────┤   little-endian
    │   op   │ size  │ body of `size` bytes │   3 acknowledges   n × (UIN u64 | device u16 | lane u8 | 0 u8 | session u32 |
                                                                       UpTo u64 | map u64)
                                                4 open sessions  n × (UIN u64 | device u16)
                                                5 add device     UIN u64 | DeviceID, 6 bytes, big-endian: by which Pi knows it
                                                6 drop devices   n × (UIN u64 | device u16)
                                               10 deletes        n × (UIN u64 | lane u8 | first u64 | last u64)

Source: DESIGN sections 5 and 11 ("Pi").
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from pixiu.ids import DEVICE_BITS

MAX_OPERATIONS_BYTES: Final = 1 << 20
"""Of one request."""
MAX_READS: Final = 1000
"""Of one request."""
MAX_READ_ENTRIES: Final = 50_000
"""Of all reads of a request together; what is beyond is cut off by Pi without a word."""
_ACKNOWLEDGES: Final = 3
_OPEN_SESSIONS: Final = 4
_ADD_DEVICE: Final = 5
_DROP_DEVICES: Final = 6
_DELETES: Final = 10
_HEAD: Final = struct.Struct("<BI")
_ACKNOWLEDGE: Final = struct.Struct("<QHBxIQQ")
_USER_DEVICE: Final = struct.Struct("<QH")
_RANGE: Final = struct.Struct("<QBQQ")
_UIN: Final = struct.Struct("<Q")


def encode_acknowledges(items: Iterable[tuple[int, int, int, int, int, int]]) -> bytes:
    """Cursors: (UIN, device, session, lane, UpTo, map) each."""
    packed = [_ACKNOWLEDGE.pack(uin, device, lane, session, up, bits) for uin, device, session, lane, up, bits in items]
    return _operation(_ACKNOWLEDGES, b"".join(packed))


def encode_opens(items: Iterable[tuple[int, int]]) -> bytes:
    """New sessions of (UIN, device) each."""
    return _operation(_OPEN_SESSIONS, b"".join([_USER_DEVICE.pack(uin, device) for uin, device in items]))


def encode_add_device(uin: int, device_id: int) -> bytes:
    """A number for the device with this DeviceID (`pixiu.ids.device_of_name`): the one that it has, if it has one."""
    return _operation(_ADD_DEVICE, _UIN.pack(uin) + client_id(device_id))


def client_id(device_id: int) -> bytes:
    """By which Pi knows a device."""
    return device_id.to_bytes(DEVICE_BITS // 8, "big")


def encode_drop_device(uin: int, device: int) -> bytes:
    """Nothing waits for a device any more."""
    return _operation(_DROP_DEVICES, _USER_DEVICE.pack(uin, device))


def encode_delete(uin: int, lane: int, first: int, last: int) -> bytes:
    """A range of InboxSeqs, for all devices."""
    return _operation(_DELETES, _RANGE.pack(uin, lane, first, last))


def _operation(op: int, body: bytes) -> bytes:
    return _HEAD.pack(op, len(body)) + body
