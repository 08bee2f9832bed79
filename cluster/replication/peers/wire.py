"""Encode messages between replicas, and the state in ZooKeeper. Malformed data from a peer or an editor is refused. Pure.

Source: docs/protocol.md, "Record", docs/registry.md, docs/replication.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Final

from google.protobuf.message import DecodeError

from cluster.replication.core.messages import Append, Appended, Message, Mismatch, Refused
from cluster.replication.model import MAX_FORCED, NOBODY, Entry, Forced, MemberID, PartitionState, Position
from cluster.replication.storage.entry import decode, encode
from cluster.wire.v1 import replication_pb2 as pb
from pixiu.errors import MalformedData
from pixiu.ids import MAX_ID

MAX_ENTRIES: Final = 65_536
"""Entries in one message. Policy: more are refused; a leader sends at most `max_append_entries`."""
MAX_MEMBERS: Final = 64
"""Members of one in-sync set. Policy: more are refused."""
MAX_EPOCH: Final = (1 << 32) - 1


def encode_message(message: Message) -> bytes:
    """Encode a message as protobuf."""
    if isinstance(message, Append):
        append = pb.ReplicaMessage.Append(
            epoch=message.epoch, sender=message.sender, entries=encode(message.entries), committed=message.committed,
            end=message.end, sent_at=message.sent_at, time_us=message.time_us,
        )  # fmt: skip
        if message.previous is not None:
            append.previous.epoch, append.previous.counter = message.previous
        for forced in message.forced:
            append.forced.add(
                epoch=forced.epoch, after=pb.ReplicaMessage.Position(epoch=forced.after.epoch, counter=forced.after.counter)
            )
        return pb.ReplicaMessage(append=append).SerializeToString()
    if isinstance(message, Appended):
        appended = pb.ReplicaMessage.Appended(
            epoch=message.epoch, sender=message.sender, incarnation=message.incarnation, matched=message.matched,
            sent_at=message.sent_at, full=message.full, wall_us=message.wall_us, room=message.space,
        )  # fmt: skip
        return pb.ReplicaMessage(appended=appended).SerializeToString()
    if isinstance(message, Mismatch):
        mismatch = pb.ReplicaMessage.Mismatch(
            epoch=message.epoch, sender=message.sender, incarnation=message.incarnation, hint=message.hint,
            sent_at=message.sent_at, full=message.full, wall_us=message.wall_us,
        )  # fmt: skip
        return pb.ReplicaMessage(mismatch=mismatch).SerializeToString()
    return pb.ReplicaMessage(refused=pb.ReplicaMessage.Refused(epoch=message.epoch, sender=message.sender)).SerializeToString()


def decode_message(data: bytes) -> Message:
    """Decode a message of a peer. Raises MalformedData."""
    try:
        body = pb.ReplicaMessage.FromString(data)
    except DecodeError as problem:
        raise MalformedData(f"a message of a replica cannot be read: {problem}") from problem
    kind = body.WhichOneof("body")
    if kind is None:
        raise MalformedData("a message of a replica is empty")
    found = getattr(body, kind)
    sender = MemberID(_id(found.sender))
    if isinstance(found, pb.ReplicaMessage.Refused):
        return Refused(found.epoch, sender)
    if math.isnan(found.sent_at):
        raise MalformedData("a message of a replica has no time")
    if isinstance(found, pb.ReplicaMessage.Appended):
        place, wall_us = _id(found.matched), _id(found.wall_us)
        return Appended(found.epoch, sender, _id(found.incarnation), place, found.sent_at, found.full, wall_us, found.room)
    if isinstance(found, pb.ReplicaMessage.Mismatch):
        place = _id(found.hint)
        return Mismatch(found.epoch, sender, _id(found.incarnation), place, found.sent_at, found.full, _id(found.wall_us))
    previous = Position(found.previous.epoch, _id(found.previous.counter)) if found.HasField("previous") else None
    entries = decode(found.entries, MAX_ENTRIES)
    _check(found.epoch, previous, entries)
    committed, end = _id(found.committed), _id(found.end)
    if len(found.forced) > MAX_FORCED:
        raise MalformedData(f"a message names {len(found.forced)} forced promotions")
    forced = tuple(Forced(each.epoch, Position(each.after.epoch, _id(each.after.counter))) for each in found.forced)
    return Append(found.epoch, sender, previous, entries, committed, end, found.sent_at, _id(found.time_us), forced)


def _id(value: int) -> int:
    if value > MAX_ID:
        raise MalformedData(f"{value} uses the top bit")
    return value


def _check(epoch: int, previous: Position | None, entries: Sequence[Entry]) -> None:
    """Check that entries are dense, and that their epochs never fall nor exceed the message's."""
    if not entries:
        return
    if previous is None:
        raise MalformedData("entries that follow nothing")
    for entry in entries:
        if entry.counter != previous.counter + 1 or not previous.epoch <= entry.epoch <= epoch:
            raise MalformedData(f"{entry.position} follows {previous} in epoch {epoch}")
        previous = entry.position


def encode_state(state: PartitionState) -> bytes:
    """Data of a partition's `state` node: JSON, members in hex."""
    data = {
        "epoch": state.epoch,
        "leader": f"{state.leader:016x}",
        "incarnation": state.incarnation,
        "in_sync": [f"{member:016x}" for member in sorted(state.in_sync)],
        "forced": [[each.epoch, *each.after] for each in state.forced],
    }
    return json.dumps(data, separators=(",", ":")).encode()


def decode_state(data: bytes) -> PartitionState:
    """Decode a `state` node. Raises MalformedData: an unreadable state is never treated as a missing one."""
    try:
        found = json.loads(data)
        epoch, incarnation, names = found["epoch"], found["incarnation"], found["in_sync"]
        if any(type(number) is not int for each in found["forced"] for number in each):
            raise TypeError("forced promotions are numbers")  # before compiled code takes them for such
        forced = tuple(Forced(began, Position(after, counter)) for began, after, counter in found["forced"])
        leader = MemberID(int(found["leader"], 16))
        in_sync = frozenset(MemberID(int(name, 16)) for name in names)
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        raise MalformedData(f"the partition's state cannot be read: {problem!r}") from problem
    whole = type(epoch) is int and type(incarnation) is int and isinstance(names, list)
    if not whole or not 0 < epoch <= MAX_EPOCH or not 0 <= incarnation <= MAX_ID:
        raise MalformedData("the partition's state has a wrong epoch or incarnation")
    if not 0 < len(in_sync) <= MAX_MEMBERS or len(in_sync) != len(names):
        raise MalformedData("the partition's state has no proper in-sync set")
    if any(not 0 < member <= MAX_ID for member in in_sync) or not NOBODY <= leader <= MAX_ID:
        raise MalformedData("the partition's state names no proper members")
    if len(forced) > MAX_FORCED or any(not _is_forced(each) or each.epoch > epoch for each in forced):
        raise MalformedData("the partition's state names no proper forced promotions")
    return PartitionState(epoch, leader, incarnation, in_sync, forced)


def _is_forced(forced: Forced) -> bool:
    numbers = (forced.epoch, *forced.after)
    return all(0 <= number <= MAX_ID for number in numbers) and forced.after.epoch < forced.epoch
