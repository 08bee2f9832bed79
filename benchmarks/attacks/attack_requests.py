"""Requests of `benchmarks.attacks.attack_load`: every gRPC method that the descriptors name, its largest request, and malformed
ones.

A method without an entry in `LARGEST` is attacked too, with a message of its type in which every field is filled.
"""

from __future__ import annotations

import pkgutil
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]

import cluster.wire.v1
import pixiu.wire.v1
from cluster.listeners.request_limits import BESIDE_BATCH_BYTES, MAX_BATCH_BYTES, MAX_BATCH_RECORDS, MAX_NAMES
from pixiu.ids import snowflake
from pixiu.wire.record import HEADER_SIZE, Flag, Kind, encode
from pixiu.wire.v1 import mail_pb2, wire_pb2
from proxy.presence import MAX_QUERY

MESSAGE_BYTES: Final = MAX_BATCH_BYTES + BESIDE_BATCH_BYTES
"""Maximum size of a message at a client's listener: 320 KiB."""
BODY: Final = bytes(MAX_BATCH_BYTES // MAX_BATCH_RECORDS - HEADER_SIZE)
ROOMS: Final = 1_000
"""Subscriptions of a connection; half of the names in one request's limit."""
FIRST_ROOM: Final = 1 << 20
MAX_UINS: Final = 1_000
"""Maximum receivers of one mail."""
NAME_BYTES: Final = 60
"""Length of a topic's name: a thousand of these are just what a connection may have."""
MAX_DEPTH: Final = 3
REPEATED: Final = 200
"""Elements of a repeated field about which nothing else is known."""


@dataclass(frozen=True)
class Method:
    """One method of a service."""

    path: str
    streams_requests: bool
    streams_replies: bool
    request: type[Message]


def methods() -> list[Method]:
    """Return every method of every service that the generated code describes, and of gRPC's own two."""
    packages = cluster.wire.v1, pixiu.wire.v1
    modules = [import_module(f"{of.__name__}.{found.name}") for of in packages for found in pkgutil.iter_modules(of.__path__)]
    files = [module.DESCRIPTOR for module in modules if hasattr(module, "DESCRIPTOR")]
    return [
        Method(f"/{service.full_name}/{one.name}", one.client_streaming, one.server_streaming,
               message_factory.GetMessageClass(one.input_type))
        for file in (*files, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for one in service.methods
    ]  # fmt: skip


def filled(descriptor: Any, size: int = MESSAGE_BYTES // 2, depth: int = 0) -> Message:
    """Make a message with something in every field, of about `size` bytes."""
    message = message_factory.GetMessageClass(descriptor)()
    fields = [field for field in descriptor.fields if field.message_type is None or depth < MAX_DEPTH]
    share = size // max(len(fields), 1)
    for field in fields:
        _fill(message, field, share, depth)
    return message


def _fill(message: Message, field: FieldDescriptor, share: int, depth: int) -> None:
    many = field.label == FieldDescriptor.LABEL_REPEATED
    count = min(share // 16, REPEATED) if many else 1
    target: Any = message
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return
        for _ in range(min(count, 20)):
            inner = filled(field.message_type, share // 20 if many else share, depth + 1)
            (getattr(target, field.name).add() if many else getattr(target, field.name)).CopyFrom(inner)
        return
    value: Any = {
        FieldDescriptor.CPPTYPE_STRING: "x" * min(share // max(count, 1), 4096) if field.type != field.TYPE_BYTES else bytes(share),
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_DOUBLE: 1.5,
        FieldDescriptor.CPPTYPE_FLOAT: 1.5,
    }.get(field.cpp_type, 1)
    if many:
        getattr(target, field.name).extend([value] * (1 if field.type == field.TYPE_BYTES else count))
    else:
        setattr(target, field.name, value)


@dataclass
class Loan:
    """A worker number that a proxy lent."""

    worker: int
    from_ms: int
    proof: bytes

    def ids(self, count: int) -> Iterator[int]:
        """Yield SnowflakeIDs of now."""
        now = max(time.time_ns() // 1_000_000 - 10, self.from_ms)
        for number in range(count):
            yield snowflake(now + number // 1024, self.worker, number % 1024)


def publish_batch(loan: Loan, *, legal: bool = True) -> bytes:
    """Make a batch of the maximum number of records, each to another room. legal=False: with IDs that are not the sender's."""
    ids = loan.ids(MAX_BATCH_RECORDS) if legal else iter(range(1, MAX_BATCH_RECORDS + 1))
    return b"".join(encode(Kind.ROOM, FIRST_ROOM + number, BODY, one, flags=Flag.TO_ROOM) for number, one in enumerate(ids))


def mail_batch(loan: Loan, number: int) -> mail_pb2.MailRequest:
    """Make a batch of the maximum number of mails; every second batch has few mails with the maximum of receivers."""
    request = mail_pb2.MailRequest()
    count = MAX_BATCH_RECORDS if number % 2 else MAX_BATCH_RECORDS // MAX_UINS
    body = BODY if number % 2 else bytes(MAX_BATCH_BYTES // count - HEADER_SIZE)
    first = FIRST_ROOM + number * MAX_BATCH_RECORDS % (1 << 16)
    request.batch = b"".join(encode(Kind.MAIL, first + at, body, one) for at, one in enumerate(loan.ids(count)))
    request.count = count
    if not number % 2:
        for index in range(count):
            more = first + count + index * MAX_UINS
            request.more.add(index=index, uins=range(more, more + MAX_UINS - 1))
    return request


def subscribe(turn: int, topics: bool) -> wire_pb2.SubscribeRequest:
    """Request a thousand joins, and as many leaves of the previous joins."""
    request = wire_pb2.SubscribeRequest(request=turn)
    now, before = turn % 2, (turn + 1) % 2
    if topics:
        request.join_topics.extend(topic(now, number) for number in range(ROOMS))
        request.leave_topics.extend(topic(before, number) for number in range(ROOMS))
    else:
        request.join_rooms.extend(range(FIRST_ROOM + now * ROOMS, FIRST_ROOM + now * ROOMS + ROOMS))
        request.leave_rooms.extend(range(FIRST_ROOM + before * ROOMS, FIRST_ROOM + before * ROOMS + MAX_NAMES - ROOMS))
    return request


def topic(half: int, number: int) -> str:
    """Make a free topic's name, of the maximum length of which a connection may have a thousand."""
    return f"attack/{half}/{number}/".ljust(NAME_BYTES, "x")


def _reflection(_turn: int) -> Message:
    found: Message = reflection_pb2.ServerReflectionRequest(host="x" * 1024, file_containing_symbol="pixiu.v1.Subscriber")
    return found


LARGEST: Final[dict[str, Callable[[int], Message]]] = {
    "/pixiu.v1.Publisher/Cluster": lambda _turn: wire_pb2.ClusterRequest(),
    "/pixiu.v1.Presence/Query": lambda turn: wire_pb2.PresenceRequest(uins=range(1 + turn * MAX_QUERY, 1 + (turn + 1) * MAX_QUERY)),
    "/grpc.health.v1.Health/Check": lambda turn: health_pb2.HealthCheckRequest(service=f"{turn}".ljust(MESSAGE_BYTES - 64, "x")),
    "/grpc.health.v1.Health/Watch": lambda turn: health_pb2.HealthCheckRequest(service=f"{turn}".ljust(MESSAGE_BYTES - 64, "x")),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _reflection,
}
"""The largest legal request, the n-th, of methods with one message; `benchmarks.attacks.attack_load` has the streams with a
hello."""


def largest(method: Method, turn: int) -> bytes:
    """Return the largest known legal request."""
    made = LARGEST.get(method.path)
    return (made(turn) if made is not None else filled(method.request.DESCRIPTOR)).SerializeToString()


def malformed(method: Method, chance: random.Random) -> list[bytes]:
    """Return the messages of one malformed call: noise, too long, cut, too many, in the wrong order."""
    good = filled(method.request.DESCRIPTOR).SerializeToString()
    hello = _hello(method)
    kinds: tuple[Callable[[], list[bytes]], ...] = (
        lambda: [chance.randbytes(chance.randrange(1, MESSAGE_BYTES))],
        lambda: [bytes(MESSAGE_BYTES + 1)],
        lambda: [bytes(8 << 20)],
        lambda: [good[: chance.randrange(len(good) + 1)]],
        lambda: [good, good, good],
        lambda: [hello, chance.randbytes(MESSAGE_BYTES // 2)],
        lambda: [hello, hello, hello],
        lambda: [hello, good],
        lambda: [hello, *_too_many(method)],
        lambda: [b"\x0a\xff\xff\xff\xff\x0f"],
        lambda: [b"\x08\x01" * (MESSAGE_BYTES // 4)],
        list,
    )
    return chance.choice(kinds)()


def _hello(method: Method) -> bytes:
    message: Any = method.request()
    if "hello" in method.request.DESCRIPTOR.fields_by_name:
        message.hello.client = "attacker"
    return bytes(message.SerializeToString())


def _too_many(method: Method) -> list[bytes]:
    message: Any = method.request()
    names = method.request.DESCRIPTOR.fields_by_name
    if "join_rooms" in names:
        message.join_rooms.extend(range(1, 30_000))
        message.leave_topics.extend(["x"] * 5_000)
    if "uins" in names:
        message.uins.extend(range(1, 30_000))
    if "batch" in names:
        message.batch, message.count, message.position = bytes(MAX_BATCH_BYTES), 1 << 31, 1
    return [message.SerializeToString()] * 3
