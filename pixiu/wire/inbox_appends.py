"""What senders of mail and those who pass it on agree on: limits, and appends as they travel to Pi. Pure.

Source: DESIGN section 9 ("Mail"); docs/protocol.md, "Inboxes".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

MAX_RECEIVERS: Final = 1000
"""Of one mail, the first included."""
GENERATION_EPOCH_S: Final = 1_577_836_800
"""2020-01-01: generations of writers are seconds since then, so that whoever gets a worker number next begins above them."""
MAX_GENERATION: Final = (1 << 32) - 1

_APPENDS: Final = 1
_FANOUT: Final = 2
_HEAD: Final = struct.Struct("<BI")
_WRITER: Final = struct.Struct("<HII")
_WRITER_AND_MSG_ID: Final = struct.Struct("<HIIQ")


def next_generation(last: int, now_s: float) -> int:
    """The generation of a writer's next stream. `now_s`: Unix seconds."""
    return min(max(last + 1, int(now_s) - GENERATION_EPOCH_S, 1), MAX_GENERATION)


def encode_appends(worker: int, generation: int, epoch: int, msg_ids: Sequence[int], uins: Sequence[int]) -> bytes:
    """The operation that appends each MsgID to the inbox of the user beside it."""
    flat: list[int] = [0] * (2 * len(msg_ids))
    flat[0::2], flat[1::2] = msg_ids, uins
    body = _WRITER.pack(worker, generation, epoch) + struct.pack(f"<{len(flat)}Q", *flat)
    return _HEAD.pack(_APPENDS, len(body)) + body


def encode_fanout(worker: int, generation: int, epoch: int, msg_id: int, uins: Iterable[int]) -> bytes:
    """The operation that appends one MsgID to several inboxes."""
    receivers = list(uins)
    body = _WRITER_AND_MSG_ID.pack(worker, generation, epoch, msg_id) + struct.pack(f"<{len(receivers)}Q", *receivers)
    return _HEAD.pack(_FANOUT, len(body)) + body
