"""A will: what it says, its state on links between gateways and relays, and the SnowflakeID that it is published with. Pure.

Source: docs/delivery.md, "Wills"; MQTT 5 section 3.1.2.5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import xxhash

from cluster.wire.v1 import control_pb2
from pixiu.errors import MalformedData
from pixiu.ids import (
    DEVICE_BITS,
    MAX_ID,
    SNOWFLAKE_EPOCH_MS,
    SNOWFLAKE_SEQUENCE_BITS,
    SNOWFLAKE_TIME_BITS,
    SNOWFLAKE_WORKER_BITS,
    SnowflakeID,
    gateway_run,
)
from pixiu.placement.topics import MAX_TOPIC_LENGTH

MAX_PAYLOAD_BYTES: Final = 64 << 10
MAX_EXTENSION_BYTES: Final = 0xFFFF
MAX_DELAY_MS: Final = (1 << 32) - 1
_SPREAD_BITS: Final = SNOWFLAKE_WORKER_BITS + SNOWFLAKE_SEQUENCE_BITS


class Phase(IntEnum):
    """Phase of a will; it only rises."""

    SET = control_pb2.WILL_SET
    ENDED = control_pb2.WILL_ENDED
    GONE = control_pb2.WILL_GONE


@dataclass(frozen=True, slots=True)
class WillMessage:
    """The message of a will."""

    topic: str
    payload: bytes = field(repr=False)
    qos: int = 0
    retain: bool = False
    extension: bytes = field(default=b"", repr=False)
    """Of the record."""

    @property
    def size(self) -> int:
        """Bytes that count for limits of memory."""
        return len(self.topic) + len(self.payload) + len(self.extension)


@dataclass(frozen=True, slots=True)
class Will:
    """A will of one connection."""

    id: int
    """Unique: built like a GatewayMsgID, so it names the run of the gateway."""
    uin: int
    device: int
    """DeviceID, without its class."""
    delay_ms: int
    """From the end of the connection on."""
    message: WillMessage

    @property
    def run(self) -> int:
        """The run of the gateway that has, or had, the connection."""
        return gateway_run(self.id)

    def message_id(self, due_ms: int) -> SnowflakeID:
        """SnowflakeID of the published will. Its time is that of the will, so that it counts as newer than what the client
        published; the rest is derived, because no worker number belongs to it. `due_ms`: Unix milliseconds."""
        words = b"".join(word.to_bytes(8, "little") for word in (self.id, self.uin, self.device))
        time = min(max(due_ms - SNOWFLAKE_EPOCH_MS, 0), (1 << SNOWFLAKE_TIME_BITS) - 1)
        return SnowflakeID(time << _SPREAD_BITS | xxhash.xxh3_64_intdigest(words) & (1 << _SPREAD_BITS) - 1)


@dataclass(frozen=True, slots=True)
class State:
    """State of a will on a link."""

    id: int
    uin: int
    device: int
    phase: Phase
    delay_ms: int = 0
    left_ms: int = 0
    """ENDED: what is left of the delay."""
    message_id: int = 0
    """ENDED: see `Will.message_id`."""
    message: WillMessage | None = None
    """None: the receiver has it."""

    @property
    def will(self) -> Will | None:
        """The will, if the state holds its message."""
        return None if self.message is None else Will(self.id, self.uin, self.device, self.delay_ms, self.message)


def state_of(will: Will, phase: Phase, *, left_ms: int = 0, message_id: int = 0, whole: bool = True) -> State:
    """State of a will. `whole`: with its message."""
    message = will.message if whole else None
    return State(will.id, will.uin, will.device, phase, will.delay_ms, max(left_ms, 0), message_id, message)


def encode(state: State) -> control_pb2.WillState:
    """Message of a state."""
    message: control_pb2.WillMessage | None = None
    if state.message is not None:
        said = state.message
        message = control_pb2.WillMessage(
            topic=said.topic, payload=said.payload, qos=said.qos, retain=said.retain, extension=said.extension
        )
    return control_pb2.WillState(
        id=state.id,
        uin=state.uin,
        device=state.device,
        phase=state.phase.value,
        delay_ms=state.delay_ms,
        left_ms=state.left_ms,
        message_id=state.message_id,
        message=message,
    )


def control_of(states: list[State]) -> bytes:
    """Control message that reports states."""
    return control_pb2.Control(will_states=control_pb2.WillStates(wills=map(encode, states))).SerializeToString()


def decode(said: control_pb2.WillState) -> State:
    """State in a message. Raises `MalformedData`."""
    message: WillMessage | None = None
    if said.HasField("message"):
        found = said.message
        message = WillMessage(found.topic, found.payload, found.qos, found.retain, found.extension)
        if not 0 < len(message.topic) <= MAX_TOPIC_LENGTH or len(message.payload) > MAX_PAYLOAD_BYTES or message.qos > 2:
            raise MalformedData("a will has a topic, a payload of at most 64 KiB, and a QoS up to 2")
        if len(message.extension) > MAX_EXTENSION_BYTES:
            raise MalformedData("the extension of a will has at most 65,535 bytes")
    if not (0 < said.id <= MAX_ID and 0 < said.uin <= MAX_ID and said.device < 1 << DEVICE_BITS and said.message_id <= MAX_ID):
        raise MalformedData("a number of a will is out of range")
    try:
        phase = Phase(said.phase)
    except ValueError:
        raise MalformedData(f"a will has no phase {said.phase}") from None
    if phase is Phase.ENDED and not said.message_id:
        raise MalformedData("a will that is due has a SnowflakeID")
    return State(said.id, said.uin, said.device, phase, said.delay_ms, said.left_ms, said.message_id, message)
