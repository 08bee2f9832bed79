"""The attacker of `benchmarks.attacks.attackers`, a process of its own: one login, 50 streams or calls at a time, one method at a
time.

It reads one command a line, `{"path", "kind", "seconds", "addresses"}`, and answers each with a line of results. Kinds:

    largest     the largest legal request, repeated as fast as the answers come
    malformed   noise, too long, too many, cut, in the wrong order, cancelled
    deaf        streams that write and never read, calls whose answers are never read
    find        the methods that exist at these addresses
    peers       every method that only processes may call, with a client's certificate where there is one
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from benchmarks.attacks.attack_requests import (
    FIRST_ROOM,
    Loan,
    Method,
    filled,
    largest,
    mail_batch,
    malformed,
    methods,
    publish_batch,
    subscribe,
)
from cluster.listeners.request_limits import MAX_BATCH_RECORDS
from pixiu.rpc.tls import Tls
from pixiu.wire.inbox_operations import next_generation
from pixiu.wire.record import Flag, Kind, encode
from pixiu.wire.v1 import mail_pb2, wire_pb2

STREAMS: Final = 50
CONNECTIONS: Final = 5
UNREAD: Final = 15
"""Calls that each of the fifty holds without reading their answers: fewer than one connection may have in all."""
CALL_S: Final = 3.0
FIND_S: Final = 20.0
"""Time after which a method that has not refused counts as existing."""
PAUSE_S: Final = 0.02
"""Interval between two tries of one stream that failed at once."""
LENT: Final = 30
"""Worker numbers that the attacker borrows: a proxy lends one login 32."""
PUBLISH, MAIL, SUBSCRIBE = "/pixiu.v1.Publisher/Publish", "/pixiu.v1.Mailer/Send", "/pixiu.v1.Subscriber/Subscribe"
LOUD_ROOM: Final = FIRST_ROOM - 1
LOUD_BODY: Final = bytes(4096)
LOUD_S: Final = 0.02
OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
DEAF: Final = (*OPTIONS, ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


class Attacker:
    """One login.

    Args:
        token: an ordinary user's token.
        authority: the authority of the listeners' certificates.
        tls_dir: has the certificate of a `client`, which the cluster's listeners refuse.
    """

    def __init__(self, token: str, authority: bytes, tls_dir: Path, proxies: list[str]) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._credentials = grpc.ssl_channel_credentials(authority)
        self._tls_dir, self._proxies = tls_dir, proxies
        self._methods = {method.path: method for method in methods()}
        self._lending: list[Any] = []
        self._loans: list[Loan] = []
        self._batches: dict[bool, bytes] = {}
        self.requests = self.refused = 0
        self.codes: Counter[str] = Counter()
        self._channels: list[grpc.aio.Channel] = []
        self._attacking = False
        self._lent: grpc.aio.Channel | None = None

    # --- what a command asks for

    async def run(self, path: str, kind: str, seconds: float, addresses: list[str]) -> dict[str, Any]:
        """Carry out one command. Returns its result."""
        self.requests = self.refused = 0
        self.codes.clear()
        if kind == "find":
            return {"found": await self._find(addresses)}
        if kind == "peers":
            return await self._peers(addresses, path.split(","), seconds)
        method = self._methods[path]
        if path in (PUBLISH, MAIL) or kind == "deaf":
            await self._borrow()
        options = DEAF if kind == "deaf" else OPTIONS
        self._channels = [self._open(address, options) for address in addresses for _ in range(CONNECTIONS)]
        one = {"largest": self._largest, "malformed": self._malformed, "deaf": self._deaf}[kind]
        extra = [asyncio.create_task(self._loud())] if (path, kind) == (SUBSCRIBE, "deaf") else []
        self._attacking = True
        tasks = [asyncio.create_task(self._again(one, method, number)) for number in range(STREAMS)] + extra
        done, _ = await asyncio.wait(tasks, timeout=seconds)
        self._attacking = False
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            self.codes[f"attacker failed: {task.exception()!r}"] += 1
        for channel in self._channels:
            await channel.close(0)
        return {"requests": self.requests, "refused": self.refused, "codes": dict(self.codes.most_common(8))}

    async def _again(self, one: Callable[[Method, int], Awaitable[None]], method: Method, number: int) -> None:
        while self._attacking:  # gRPC may turn a task's cancellation into the status of its call
            began = time.monotonic()
            try:
                await one(method, number)
            except grpc.aio.AioRpcError as error:
                self._ended(error.code())
            except (TimeoutError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
                self.codes[type(error).__name__] += 1
            if time.monotonic() < began + PAUSE_S:
                await asyncio.sleep(PAUSE_S)

    def _ended(self, code: grpc.StatusCode) -> None:
        self.codes[code.name] += 1
        self.refused += code is not grpc.StatusCode.OK

    def _open(self, address: str, options: Sequence[tuple[str, int]] = OPTIONS) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, self._credentials, options=options)

    def _call(self, method: Method, channel: grpc.aio.Channel, requests: bool | None = None) -> Any:
        """Make a call that carries raw bytes."""
        streams = method.streams_requests if requests is None else requests
        made = channel.stream_stream if streams else channel.unary_stream
        return made(method.path)

    def _channel(self, number: int) -> grpc.aio.Channel:
        return self._channels[number % len(self._channels)]

    # --- the largest

    async def _largest(self, method: Method, number: int) -> None:
        special = {PUBLISH: self._publish, MAIL: self._mail, SUBSCRIBE: self._subscribe}.get(method.path)
        if special is not None:
            await special(method, number)
        elif method.streams_requests:
            call = self._call(method, self._channel(number))(metadata=self._metadata)
            for turn in range(1 << 30):
                await call.write(largest(method, turn))
                self.requests += 1
                if method.streams_replies and await call.read() is grpc.aio.EOF:
                    break
            self._ended(await call.code())
        else:
            self.requests += 1
            call = self._call(method, self._channel(number))(
                largest(method, self.requests), metadata=self._metadata, timeout=CALL_S
            )
            while await call.read() is not grpc.aio.EOF:
                pass
            self._ended(await call.code())

    async def _borrow(self) -> None:
        """Borrow worker numbers, each held by a stream of its own."""
        if self._loans:
            return
        method = self._methods[PUBLISH]
        self._lent = self._open(self._proxies[0])
        for _ in range(LENT):
            call = self._call(method, self._lent)(metadata=self._metadata)
            hello = wire_pb2.PublishHello(client="attacker", lend_worker=True)
            await call.write(wire_pb2.PublishRequest(hello=hello).SerializeToString())
            data = await call.read()
            if data is grpc.aio.EOF:
                self.codes["no worker number"] += 1
                break
            reply = wire_pb2.PublishReply.FromString(data)
            if not reply.worker_until_ms:
                break
            self._loans.append(Loan(reply.worker, reply.worker_from_ms, reply.loan))
            self._lending.append(call)
        self._batches = {legal: publish_batch(self._loans[0], legal=legal) for legal in (True, False)}

    async def _publish(self, method: Method, number: int) -> None:
        """Keep as much in flight as the window allows."""
        call = self._call(method, self._channel(number))(metadata=self._metadata)
        hello = wire_pb2.PublishHello(client="attacker")
        await call.write(wire_pb2.PublishRequest(hello=hello, loans=[self._loans[0].proof]).SerializeToString())
        batch, sent, resolved = self._batches[True], 0, 0
        first = await call.read()
        window = wire_pb2.PublishReply.FromString(first).window_bytes if first is not grpc.aio.EOF else 0
        while window:
            while (sent - resolved + MAX_BATCH_RECORDS) // MAX_BATCH_RECORDS * len(batch) <= window:
                request = wire_pb2.PublishRequest(batch=batch, count=MAX_BATCH_RECORDS, position=sent + 1)
                await call.write(request.SerializeToString())
                self.requests += 1
                sent += MAX_BATCH_RECORDS
            data = await call.read()
            if data is grpc.aio.EOF:
                break
            reply = wire_pb2.PublishReply.FromString(data)
            resolved = max(resolved, reply.up_to)
            for failure in reply.failures:
                self.codes[failure.code] += failure.last - failure.first + 1
        self._ended(await call.code())

    async def _mail(self, method: Method, number: int) -> None:
        loan = self._loans[number % len(self._loans)]
        call = self._call(method, self._channel(number))(metadata=self._metadata)
        hello = mail_pb2.MailHello(client="attacker", worker=loan.worker, generation=next_generation(0, time.time()))
        await call.write(mail_pb2.MailRequest(hello=hello, loans=[loan.proof]).SerializeToString())
        first = await call.read()
        window = mail_pb2.MailReply.FromString(first).window_bytes if first is not grpc.aio.EOF else 0
        position, open_bytes, turn, waiting = 1, 0, number, 0
        while window:
            request = mail_batch(loan, turn)
            request.position = position
            if open_bytes + len(request.batch) <= window:
                await call.write(request.SerializeToString())
                self.requests += 1
                turn, position, waiting = turn + 1, position + request.count, waiting + request.count
                open_bytes += len(request.batch)
                continue
            data = await call.read()
            if data is grpc.aio.EOF:
                break
            reply = mail_pb2.MailReply.FromString(data)
            for result in reply.results:
                waiting -= result.count
                if result.code:
                    self.codes[result.code] += result.count
            if not waiting:
                open_bytes = 0
            if reply.HasField("end"):
                self.codes[f"end {reply.end.code}"] += 1
                self.refused += 1
                break
        self._ended(await call.code())

    async def _subscribe(self, method: Method, number: int) -> None:
        call = self._call(method, self._channel(number))(metadata=self._metadata)
        hello = wire_pb2.SubscribeHello(client=f"attacker-{number}")
        await call.write(wire_pb2.SubscribeRequest(hello=hello).SerializeToString())
        await call.read()
        for turn in range(1, 1 << 30):
            await call.write(subscribe(turn, topics=bool(number % 2)).SerializeToString())
            self.requests += 1
            data = await call.read()
            if data is grpc.aio.EOF:
                break
            code = wire_pb2.SubscribeReply.FromString(data).error_code
            if code:
                self.codes[code] += 1
                self.refused += 1
        self._ended(await call.code())

    # --- malformed, and deaf

    async def _malformed(self, method: Method, number: int) -> None:
        chance = random.Random(time.monotonic_ns())
        said = malformed(method, chance)
        self.requests += 1
        async with asyncio.timeout(CALL_S):
            if method.streams_requests:
                call = self._call(method, self._channel(number))(metadata=self._metadata)
                with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.UsageError):
                    for message in said:
                        await call.write(message)
                    await call.done_writing()
            else:
                call = self._call(method, self._channel(number))(said[0] if said else b"", metadata=self._metadata)
            if not chance.randrange(4):  # reset as soon as it has begun
                call.cancel()
                self.codes["cancelled"] += 1
                return
            for _ in range(3):
                if await call.read() is grpc.aio.EOF:
                    break
            else:
                call.cancel()
            self._ended(await call.code())

    async def _deaf(self, method: Method, number: int) -> None:
        if not method.streams_requests:
            calls = []
            for turn in range(UNREAD):
                self.requests += 1
                calls.append(self._call(method, self._channel(number))(largest(method, turn), metadata=self._metadata))
                await asyncio.sleep(PAUSE_S)
            async with asyncio.timeout(20):
                await asyncio.gather(*(call.code() for call in calls))  # they do not end without reading
            return
        call = self._call(method, self._channel(number))(metadata=self._metadata)
        for message in self._of_deaf(method.path, number):
            await call.write(message)
        again = self._deaf_request(method, number)
        turn = 0
        while not call.done():
            turn += 1
            await call.write(again(turn))
            self.requests += 1
            await asyncio.sleep(0)
        self._ended(await call.code())

    def _of_deaf(self, path: str, number: int) -> list[bytes]:
        loan = self._loans[number % len(self._loans)]
        if path == PUBLISH:
            said: Any = wire_pb2.PublishRequest(hello=wire_pb2.PublishHello(client="deaf"), loans=[loan.proof])
        elif path == MAIL:
            hello = mail_pb2.MailHello(client="deaf", worker=loan.worker, generation=next_generation(0, time.time()))
            said = mail_pb2.MailRequest(hello=hello, loans=[loan.proof])
        elif path == SUBSCRIBE:
            said = wire_pb2.SubscribeRequest(hello=wire_pb2.SubscribeHello(client=f"deaf-{number}"), join_rooms=[LOUD_ROOM])
        else:
            return []
        return [said.SerializeToString()]

    def _deaf_request(self, method: Method, number: int) -> Callable[[int], bytes]:
        """Return the repeated request of a deaf stream: one that gets an answer each time."""
        loan = self._loans[number % len(self._loans)]
        if method.path == PUBLISH:
            batch = self._batches[False]
            return lambda turn: (
                wire_pb2.PublishRequest(renew_worker=True)
                if turn % 4
                else wire_pb2.PublishRequest(batch=batch, count=MAX_BATCH_RECORDS, position=1 + (turn // 4 - 1) * MAX_BATCH_RECORDS)
            ).SerializeToString()
        if method.path == MAIL:
            record = encode(Kind.MAIL, FIRST_ROOM, b"deaf", next(loan.ids(1)))
            return lambda turn: mail_pb2.MailRequest(batch=record, count=1, position=turn).SerializeToString()
        if method.path == SUBSCRIBE:
            return lambda turn: wire_pb2.SubscribeRequest(request=turn, leave_rooms=[FIRST_ROOM]).SerializeToString()
        return lambda turn: largest(method, turn)

    async def _loud(self) -> None:
        """Fill the room that the deaf subscribers are in."""
        method, position = self._methods[PUBLISH], 0
        call = self._call(method, self._lent or self._open(self._proxies[0]))(metadata=self._metadata)
        loan = self._loans[0]
        hello = wire_pb2.PublishHello(client="loud")
        await call.write(wire_pb2.PublishRequest(hello=hello, loans=[loan.proof]).SerializeToString())

        async def read() -> None:
            while await call.read() is not grpc.aio.EOF:
                pass

        reading = asyncio.create_task(read())
        try:
            while not call.done():
                position += 1
                record = encode(Kind.ROOM, LOUD_ROOM, LOUD_BODY, next(loan.ids(1)), flags=Flag.TO_ROOM)
                request = wire_pb2.PublishRequest(batch=record, count=1, position=position)
                await call.write(request.SerializeToString())
                await asyncio.sleep(LOUD_S)
        finally:
            reading.cancel()
            call.cancel()

    # --- which methods there are

    async def _find(self, addresses: list[str]) -> list[str]:
        found = []
        for address in addresses:
            async with self._open(address) as channel:
                codes = await asyncio.gather(*(self._ask(method, channel, b"") for method in self._methods.values()))
            found += [path for path, code in zip(self._methods, codes, strict=True) if code is not grpc.StatusCode.UNIMPLEMENTED]
        return found

    async def _ask(self, method: Method, channel: grpc.aio.Channel, message: bytes) -> grpc.StatusCode:
        """Return the status with which a call ends; OK: it has answered, or waits for more. A stream sends nothing: a write that
        meets the end of a refused call makes gRPC's client forget the status."""
        self.requests += 1
        try:
            async with asyncio.timeout(FIND_S):
                if method.streams_requests:
                    call = self._call(method, channel)(metadata=self._metadata)
                else:
                    call = self._call(method, channel)(message, metadata=self._metadata)
                code: grpc.StatusCode = await call.code() if await call.read() is grpc.aio.EOF else grpc.StatusCode.OK
                call.cancel()
        except TimeoutError:
            return grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
        return code

    async def _peers(self, addresses: list[str], paths: list[str], seconds: float) -> dict[str, Any]:
        """Try methods for processes. `addresses`: role@host:port of the cluster's listeners, host:port of the clients'. Returns
        those that answered although they should refuse."""
        own = Tls(self._tls_dir, "client").channel_credentials()
        channels = {}
        for address in addresses:
            role, _, at = address.rpartition("@")
            name = (("grpc.ssl_target_name_override", f"{role}.pixiu"),) if role else ()
            channels[address] = grpc.aio.secure_channel(at, own if role else self._credentials, options=(*OPTIONS, *name))
        wrong: set[str] = set()
        end = time.monotonic() + seconds

        async def one(number: int) -> None:
            chance = random.Random(number)
            while time.monotonic() < end:
                path, address = chance.choice(paths), chance.choice(addresses)
                method = self._methods[path]
                code = await self._ask(method, channels[address], filled(method.request.DESCRIPTOR).SerializeToString())
                self._ended(code)
                if code is grpc.StatusCode.OK:
                    wrong.add(f"{path} at {address}")

        await asyncio.gather(*(one(number) for number in range(STREAMS)))
        for channel in channels.values():
            await channel.close(0)
        return {"requests": self.requests, "refused": self.refused, "codes": dict(self.codes), "wrong": sorted(wrong)}


async def serve(token: str, authority: Path, tls_dir: Path, proxies: list[str]) -> None:
    """Carry out commands, one after the other, until the input ends."""
    attacker = Attacker(token, authority.read_bytes(), tls_dir, proxies)
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        found = await attacker.run(command["path"], command["kind"], command["seconds"], command["addresses"])
        print(json.dumps(found), flush=True)


def main() -> None:
    """Run. Arguments: niceness, file of the token, file of the authority, folder of certificates, proxies."""
    nice, token, authority, tls_dir, *proxies = sys.argv[1:]
    os.nice(int(nice))
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(nice)
    asyncio.run(serve(Path(token).read_text(), Path(authority), Path(tls_dir), proxies))


if __name__ == "__main__":
    main()
