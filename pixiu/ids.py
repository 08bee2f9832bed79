"""The identifiers of Pixiu as types, and functions to build them and take them apart.

All are unsigned 64-bit numbers whose top bit is never used, so that they fit signed columns in Spark and Java.

    SnowflakeID   0 | 41 bits ms since 2020-01-01 | 12 bits worker | 10 bits sequence
    GatewayMsgID  16 bits gateway instance (top bit 0) | 10 bits generation | 38 bits counter
    MsgID         8 bits Xiu partition (top bit 0) | 8 bits type | 48 bits sequence: 16 bits leader epoch | 32 bits counter

Source: PiXiu §5.1.1; docs/identifiers.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from operator import index
from typing import Final, NewType

import xxhash

from pixiu.errors import LeaseExpired

UIN = NewType("UIN", int)
RoomID = NewType("RoomID", int)
DeviceID = NewType("DeviceID", int)
SnowflakeID = NewType("SnowflakeID", int)
MsgID = NewType("MsgID", int)
GatewayMsgID = NewType("GatewayMsgID", int)
LogID = NewType("LogID", int)
PartitionID = NewType("PartitionID", int)
ReplicaID = NewType("ReplicaID", int)
WorkerID = NewType("WorkerID", int)
InstanceID = NewType("InstanceID", int)
EndpointID = NewType("EndpointID", int)
"""One run of one process, as seen by links and routing: 63 random bits, new at every start."""

SNOWFLAKE_EPOCH_MS: Final = 1_577_836_800_000
"""2020-01-01T00:00:00Z in Unix milliseconds."""
BEFORE_2020: Final = "this machine's clock shows a time before 2020: set it"
SNOWFLAKE_TIME_BITS: Final = 41
SNOWFLAKE_WORKER_BITS: Final = 12
SNOWFLAKE_SEQUENCE_BITS: Final = 10
WORKERS: Final = 1 << SNOWFLAKE_WORKER_BITS

MSG_SEQUENCE_BITS: Final = 48
"""Bits of the Partition_Msg_ID in a MsgID: leader epoch and counter."""
MSG_COUNTER_BITS: Final = 32
MAX_MSG_EPOCH: Final = (1 << MSG_SEQUENCE_BITS - MSG_COUNTER_BITS) - 1
MAX_MSG_SEQUENCE: Final = (1 << MSG_SEQUENCE_BITS) - 1

GATEWAY_INSTANCE_BITS: Final = 15
GATEWAY_GENERATION_BITS: Final = 10
GATEWAY_COUNTER_BITS: Final = 38
INSTANCES: Final = 1 << GATEWAY_INSTANCE_BITS
KEPT_INSTANCE: Final = INSTANCES - 1
"""No gateway leases this instance: by it routers report rooms with kept filters to brokers, as if it were one. Its GatewayMsgIDs
have Unix milliseconds instead of generation and counter."""
LAST_GENERATION: Final = (1 << GATEWAY_GENERATION_BITS) - 1
"""A gateway instance at this generation is retired."""

MAX_ID: Final = (1 << 63) - 1
MAX_ROOM: Final = (1 << 62) - 1
"""Highest RoomID that an application may use; the ones above carry free topics."""
DEVICE_BITS: Final = 48
MAX_DEVICE: Final = (1 << DEVICE_BITS - 1) - 1
"""Highest DeviceID that a client may choose; the ones above are derived from names."""
MAX_DEVICE_CLASS: Final = (1 << 15) - 1
TOPIC_ROOM: Final = 1 << 62
"""Rooms from this one on carry free topics."""
ALL_TOPICS: Final = MAX_ID + 1 - 128
"""The first of the rooms that carry all free topics, one for each partition that brokers may have: those of filters with a
wildcard in their first level. A multiple of all numbers of partitions."""

PROBE_BITS: Final = 20
PROBE_ROOM: Final = MAX_ROOM + 1 - (1 << PROBE_BITS)
"""RoomIDs from this one to MAX_ROOM are reserved for `pixiu probe`."""
PROBE_UIN: Final = MAX_ID + 1 - (1 << PROBE_BITS)
"""UINs from this one to MAX_ID are reserved for the pseudo-users of `pixiu probe`."""

assert SNOWFLAKE_TIME_BITS + SNOWFLAKE_WORKER_BITS + SNOWFLAKE_SEQUENCE_BITS == 63
assert GATEWAY_INSTANCE_BITS + GATEWAY_GENERATION_BITS + GATEWAY_COUNTER_BITS == 63


def snowflake(time_ms: int, worker: int, sequence: int) -> SnowflakeID:
    """Build a SnowflakeID from Unix milliseconds, a worker number and a sequence within that millisecond."""
    return SnowflakeID((((time_ms - SNOWFLAKE_EPOCH_MS) << 12 | worker) << 10) | sequence)


def snowflake_time_ms(snowflake_id: int) -> int:
    """The Unix milliseconds in a SnowflakeID."""
    return (snowflake_id >> 22) + SNOWFLAKE_EPOCH_MS


def snowflake_worker(snowflake_id: int) -> WorkerID:
    """The worker number in a SnowflakeID."""
    return WorkerID(snowflake_id >> 10 & (WORKERS - 1))


def msg_id(partition: int, type_: int, sequence: int) -> MsgID:
    """Build a MsgID from a Xiu partition, a message type and a Partition_Msg_ID. Source: PiXiu §6.1.1 step 4."""
    return MsgID((partition << 8 | type_) << MSG_SEQUENCE_BITS | sequence)


def msg_sequence(msg_id: int) -> int:
    """The Partition_Msg_ID in a MsgID; it orders the messages of a partition."""
    return msg_id & MAX_MSG_SEQUENCE


def msg_type(msg_id: int) -> int:
    """The message type in a MsgID."""
    return msg_id >> MSG_SEQUENCE_BITS & 0xFF


def msg_lane(msg_id: int) -> int:
    """The lane in a MsgID: the top two bits of its type."""
    return msg_id >> MSG_SEQUENCE_BITS + 6 & 3


def msg_partition(msg_id: int) -> PartitionID:
    """The Xiu partition that assigned a MsgID and keeps the message for ever."""
    return PartitionID(msg_id >> MSG_SEQUENCE_BITS + 8)


def gateway_msg_id(instance: int, generation: int, counter: int) -> GatewayMsgID:
    """Build a GatewayMsgID. Source: PiXiu §5.1.1; its reserved bits hold the generation here."""
    return GatewayMsgID((instance << 10 | generation) << 38 | counter)


def gateway_instance(msg_id: int) -> InstanceID:
    """The gateway instance that assigned a GatewayMsgID."""
    return InstanceID(msg_id >> 48)


def gateway_generation(msg_id: int) -> int:
    """The generation of the gateway instance that assigned a GatewayMsgID, 0 to 1023."""
    return msg_id >> 38 & LAST_GENERATION


def gateway_run(msg_id: int) -> int:
    """The run of the gateway that assigned a GatewayMsgID: its instance and generation, in one number."""
    return msg_id >> GATEWAY_COUNTER_BITS


def uin_of_name(name: str) -> UIN:
    """A user name's UIN: its decimal number below 2^63, else 63 bits of its xxh3. Source: docs/operations.md."""
    if name.isascii() and name.isdecimal() and len(name) <= 19 and 0 < int(name) <= MAX_ID:
        return UIN(int(name))
    return UIN(xxhash.xxh3_64_intdigest(name.encode()) & MAX_ID)


def session_uin(uin: int, client_id: str) -> UIN:
    """The pseudo-user whose inbox holds what an MQTT session that outlives its connection still has to get: 63 bits of a BLAKE2b.
    Clients choose their IDs: one that leads to another user's inbox is found in seconds for an xxh3.
    Source: docs/mqtt.md, "Sessions"."""
    digest = hashlib.blake2b(f"session {uin} {client_id}".encode(), digest_size=8).digest()
    return UIN(int.from_bytes(digest) & MAX_ID)


def device_of_name(name: str) -> DeviceID:
    """The DeviceID of a client that is known only by its name: the top bit and 47 bits of the name's xxh3. Two devices of a user do
    not share one, and it never equals a number that a client chose."""
    return DeviceID(MAX_DEVICE + 1 | xxhash.xxh3_64_intdigest(name.encode()) & MAX_DEVICE)


def device_class_of_name(name: str) -> int:
    """The number of a device class such as "phone": 0 for the empty name, else 1 to 32767, by xxh3."""
    return xxhash.xxh3_64_intdigest(name.encode()) % MAX_DEVICE_CLASS + 1 if name else 0


def topic_room(topic: str) -> RoomID:
    """The room that carries a free topic unless a rule assigns another one: a hash of its first level. Source: docs/routing.md."""
    first = topic.split("/", 1)[0]
    return RoomID(TOPIC_ROOM | xxhash.xxh3_64_intdigest(first.encode()) >> 2)


def hex_id(number: int) -> str:
    """Format an ID as logs show it."""
    return f"{number:016x}"


class SnowflakeGenerator:
    """Makes SnowflakeIDs for one worker number that is leased for a range of time.

    The clock of a generator never goes back. When the system clock steps back, or the 1 024 numbers of a millisecond are used up,
    the generator continues from the highest time it has used. It makes IDs only for times in [from_ms, until_ms).

    Source: docs/identifiers.md. Departs from PiXiu §2.1 because a worker number that is reused after a
    restart must never repeat a time.
    """

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._worker = 0
        self._until_ms = 0
        self._last_ms = 0
        self._sequence = 0

    @property
    def last_used_ms(self) -> int:
        """The highest time used so far, Unix milliseconds."""
        return self._last_ms

    @property
    def worker(self) -> WorkerID:
        """The worker number in use."""
        return WorkerID(self._worker)

    @property
    def until_ms(self) -> int:
        """The first Unix millisecond for which no ID may be made; 0 before the first lease."""
        return self._until_ms

    def usable(self, spare_ms: int = 0) -> bool:
        """True if an ID can be made now, and for `spare_ms` more as far as the lease goes."""
        return SNOWFLAKE_EPOCH_MS <= max(self._clock_ms(), self._last_ms) < self._until_ms - spare_ms

    def why_not(self) -> str:
        """The reason why no ID can be made now; empty if one can."""
        now = max(self._clock_ms(), self._last_ms)
        if now < SNOWFLAKE_EPOCH_MS:
            return BEFORE_2020
        if now < self._until_ms:
            return ""
        ago_s = (now - self._until_ms) // 1000
        return f"the worker number {self._worker} for message IDs ended {ago_s} s ago by this machine's clock"

    def lease(self, worker: int, from_ms: int, until_ms: int) -> None:
        """Use a worker number for times in [from_ms, until_ms), Unix milliseconds."""
        if worker != self._worker or from_ms > self._last_ms:
            self._last_ms = max(from_ms - 1, 0) if worker != self._worker else max(self._last_ms, from_ms - 1)
            self._sequence = (1 << SNOWFLAKE_SEQUENCE_BITS) - 1
        self._worker = worker
        self._until_ms = until_ms

    def next(self) -> SnowflakeID:
        """Make the next ID. Raises `LeaseExpired` when the time of the worker number is over."""
        at, sequence = self._clock_ms(), 0
        if at <= self._last_ms:
            at, sequence = self._last_ms, self._sequence + 1
            if sequence > 1023:
                at, sequence = at + 1, 0
        if not SNOWFLAKE_EPOCH_MS <= at < self._until_ms:  # no number is consumed, because the clock may be set back
            if at < SNOWFLAKE_EPOCH_MS:
                raise LeaseExpired(f"{BEFORE_2020}, because IDs name no earlier one")
            raise LeaseExpired(f"worker number {self._worker} was held until {self._until_ms} ms; take or renew a lease")
        self._last_ms, self._sequence = at, sequence
        return SnowflakeID((((at - SNOWFLAKE_EPOCH_MS) << 12 | self._worker) << 10) | sequence)  # `snowflake`, without a call


def is_within(number: object, lowest: int, highest: int) -> bool:
    """True if a value from a caller is an integer from `lowest` to `highest`."""
    try:
        return lowest <= index(number) <= highest  # type: ignore[arg-type]  # what else it is, TypeError says
    except TypeError:
        return False
