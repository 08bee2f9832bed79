"""Keys of the rows in which a Xiu keeps its state, a letter for each space. Pure.

    b"h"                                    the head: applied position, clock, last sequence, floor, bytes
    b"o" name                               a reader that retention waits for (`xiu.state.readers`): position u64, since µs u64
    b"r" sequence u64                       a block of records (`xiu.records.block`)
    b"t" sequence u64                       a mark: clock µs u64, bytes stored before it u64; where the store may be trimmed
    b"w" place u64                          a run of SnowflakeIDs, by the place of its first one (`xiu.state.dedupe`)
    b"s" SnowflakeID u64                    one SnowflakeID: MsgID u64, CRC u32
    b"d" day u16, derived ID u64            the same for derived IDs, which hold no time: by the day when they were stored

Keys are big-endian, values little-endian.

Source: docs/stores.md.
"""

from __future__ import annotations

import struct
from typing import Final

HEAD_KEY: Final = b"h"
HOLDS: Final = b"o"
BLOCKS: Final = b"r"
MARKS: Final = b"t"
RUNS: Final = b"w"
SNOWFLAKES: Final = b"s"
DERIVED: Final = b"d"

KEY: Final = struct.Struct(">cQ")
DERIVED_KEY: Final = struct.Struct(">cHQ")
HELD: Final = struct.Struct("<QQ")
MARK: Final = struct.Struct("<QQ")
DEDUPE: Final = struct.Struct("<QI")
"""Value of one SnowflakeID: MsgID, CRC."""
