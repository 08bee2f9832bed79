"""The shell of probes: a stream to every proxy and every gateway, a clock, and the registry around `tools.probe.paths`.

Source: PiXiu §3.1; docs/architecture.md, "Probes and traces".
"""

from __future__ import annotations

import asyncio
import secrets
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import xxhash

from pixiu.client.login import authorization
from pixiu.client.receive.gateway_stream import GatewayStream, Waiter
from pixiu.discovery.target import names_registry, parse_address
from pixiu.discovery.view import View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, MalformedData, PixiuError, Unavailable
from pixiu.ids import MAX_ID, PROBE_BITS, PROBE_UIN
from pixiu.rpc.channels import Channels
from pixiu.rpc.client_tls import client_tls
from pixiu.rpc.duplex import Duplex, StreamEnded
from pixiu.rpc.grpc_streams import GrpcCall
from pixiu.wire.record import Flag, Kind, encode, split
from pixiu.wire.record import decode as decode_record
from pixiu.wire.trace import Hop, Stamp, stamps_of, with_stamp
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from tools.probe.paths import PROBED, Finding, Member, Probe, Prober, PseudoUser

CLIENT: Final = "pixiu-probe"
BODY: Final = struct.Struct("<QQ")
"""Body of a probe: the number of the run and that of the probe."""
FLAGS: Final = Flag.TRACED | Flag.DERIVED_ID
RECONNECT_S: Final = 0.5
LOOK_S: Final = 0.05
"""Interval at which late probes are looked for, seconds."""
MAX_QUEUED: Final = 10_000
"""Limit of probes that wait to be written to one proxy; more have failed."""
CONNECT_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """Options of a probe run."""

    count: int
    """Number of rounds; 0: unlimited."""
    interval_s: float
    timeout_s: float
    failures: int
    """Failures in a row on a path that raise an alarm."""
    join_timeout_s: float
    """Time limit for subscriptions before the first round, seconds."""
    for_s: float = 0.0
    """Time after which the run ends, seconds; 0: never."""


class _ProxyStream:
    """Publishes through one proxy only."""

    def __init__(
        self, proxy: Member, channels: Channels, lost: Callable[[int, str], None], not_taken: Callable[[int], None]
    ) -> None:
        self.proxy = proxy
        self._channels = channels
        self._lost = lost
        self._not_taken = not_taken
        self._queue: list[tuple[int, bytes]] = []
        self._more = asyncio.Event()
        self._position, self._greeted = 0, False
        self._positions: dict[int, int] = {}
        self._problem = "the proxy is not connected yet"
        self.connected = asyncio.Event()
        """Set when the proxy has answered."""
        self._task = asyncio.create_task(self._run(), name=f"probe-{proxy.address}")

    def send(self, number: int, record: bytes) -> None:
        """Publish a probe; one that cannot be sent is lost at once."""
        if not self.connected.is_set():
            self._lost(number, f"not sent: {self._problem}")
            return
        if len(self._queue) + len(self._positions) >= MAX_QUEUED:
            self._lost(number, "not sent: the proxy does not answer")
            return
        self._queue.append((number, record))
        self._more.set()

    async def close(self) -> None:
        """End the stream."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._position, self._greeted = 0, False
            call: GrpcCall[wire_pb2.PublishRequest, wire_pb2.PublishReply] = GrpcCall.over(
                self._channels,
                self.proxy.address,
                lambda channel: wire_pb2_grpc.PublisherStub(channel).Publish(metadata=self._channels.metadata()),
            )
            async with call:
                end = await Duplex(call, self._take, self._give, work=self._more).run()
            self.connected.clear()
            self._problem = end.text
            for number in (*(number for number, _ in self._queue), *self._positions.values()):
                self._lost(number, f"the stream to the proxy ended: {self._problem}")
            self._queue.clear()
            self._positions.clear()
            await asyncio.sleep(RECONNECT_S)

    def _give(self) -> wire_pb2.PublishRequest | None:
        if not self._greeted:
            self._greeted = True
            return wire_pb2.PublishRequest(hello=wire_pb2.PublishHello(client=CLIENT))
        if not self._queue:
            return None
        self._position += 1
        self._positions[self._position], record = self._queue.pop(0)
        return wire_pb2.PublishRequest(batch=record, count=1, position=self._position)

    def _take(self, reply: wire_pb2.PublishReply) -> None:
        self.connected.set()
        for failure in reply.failures:
            for position in range(failure.first, failure.last + 1):
                if position not in self._positions:
                    continue
                if failure.code == InvalidArgument.code:  # such as `proxy.kinds` without "chat": no failure of a path
                    self._not_taken(self._positions[position])
                else:
                    self._lost(self._positions[position], f"refused by the proxy: {failure.text}")
        for position in [position for position in self._positions if position <= reply.up_to]:
            del self._positions[position]


class _Subscriber:
    """A pseudo-user at one gateway: in every probe room, or taking messages to itself."""

    def __init__(
        self, gateway: Member, uin: int, channels: Channels, arrived: Callable[[int, bytes], None], *, chat: bool = False
    ) -> None:
        self.gateway = gateway
        self.joined = asyncio.Event()
        """Set when the whole cluster knows all rooms, or the user."""
        self.problem = "it has not confirmed the subscriptions"
        self._uin = uin
        self._chat = chat
        self._channels = channels
        self._arrived = arrived
        self._rooms: set[int] = set()
        self._stream: GatewayStream | None = None
        self._task = asyncio.create_task(self._run(), name=f"probe-{gateway.address}")

    def join(self, rooms: Iterable[int]) -> None:
        """Join these rooms and leave all others."""
        self._rooms = set(rooms)
        self._reconcile()

    async def close(self) -> None:
        """End the stream."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _reconcile(self) -> None:
        if self._stream is None:
            return
        waiter = Waiter(frozenset(self._rooms), frozenset())
        waiter.done.add_done_callback(self._confirmed)
        self._stream.reconcile(self._rooms, set(), [waiter])

    def _confirmed(self, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self.joined.set()
        else:
            self.problem = str(error)

    async def _run(self) -> None:
        while True:
            self._stream = stream = GatewayStream(self.gateway.address, self._channels, self._uin, CLIENT, chat=self._chat)
            try:
                self._reconcile()
                while True:
                    await asyncio.wait({stream.read()})
                    reply = stream.take()
                    if reply is None:
                        break
                    self._take(stream, reply)
            except (PixiuError, StreamEnded) as error:
                self.problem = str(error)
            finally:
                self._stream = None
                await stream.close()
            await asyncio.sleep(RECONNECT_S)

    def _take(self, stream: GatewayStream, reply: wire_pb2.SubscribeReply) -> None:
        if reply.error_code:
            stream.refused(reply.request, reply.error_code, reply.error_text)
        elif reply.request:
            stream.confirmed(reply.request)
        if reply.count:
            try:
                records = split(reply.batch, reply.count)
            except MalformedData:
                return
            for record in records:
                self._arrived(self.gateway.endpoint, record)


class ProbeRun:
    """Probes a cluster: `async with ProbeRun(…) as run:`, then rounds.

    Args:
        target: zk://HOST:PORT/ROOT.
        options: options of the run.
        on_findings: called with the findings when they have changed; empty when nothing fails any more.
    """

    def __init__(self, target: str, options: ProbeOptions, on_findings: Callable[[list[Finding]], None]) -> None:
        if not names_registry(target):
            raise InvalidArgument(f"--target {target}: what paths a cluster has is in its registry; give zk://HOST:PORT/ROOT")
        self._address = parse_address(target)
        self._options = options
        self._on_findings = on_findings
        self._uin = PROBE_UIN + secrets.randbits(PROBE_BITS)
        self.prober = Prober(options.failures, options.timeout_s, first_user=self._uin - PROBE_UIN + 1)
        self.alarms = 0
        """Number of times that `on_findings` was called with findings."""
        self._findings: list[Finding] = []
        self._problem: PixiuError | None = None
        self._run = secrets.randbits(63)
        self._channels = Channels(authorization=authorization(None), tls=client_tls())
        self._zookeeper = ZooKeeper(self._address, connect_timeout_s=CONNECT_TIMEOUT_S)
        self._discovery = Discovery(self._zookeeper, self._address.root, self._on_view, roles=PROBED)
        self._proxies: dict[int, _ProxyStream] = {}
        self._subscribers: dict[int, _Subscriber] = {}
        self._users: dict[PseudoUser, _Subscriber] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Read the cluster's state and subscribe. Raises `RegistryUnavailable`, and `Unavailable` when there is nothing to
        probe."""
        await self._zookeeper.connect()
        try:
            await self._discovery.start()
            if self._problem is not None:
                raise self._problem
            if not self.prober.paths:
                raise Unavailable(
                    f"no path to probe below {self._address.root}: it takes a Running proxy, broker and gateway; see `pixiu status`"
                )
            ready = [found.joined for found in (*self._subscribers.values(), *self._users.values())]
            ready += [found.connected for found in self._proxies.values()]
            waiting = [asyncio.create_task(event.wait()) for event in ready]
            await asyncio.wait(waiting, timeout=self._options.join_timeout_s)
            for task in waiting:
                task.cancel()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._close()

    @property
    def unjoined(self) -> list[tuple[Member, str]]:
        """Gateways at which a pseudo-user is missing, with the reason: one for each."""
        everybody = (*self._users.values(), *self._subscribers.values())
        return list({found.gateway: found.problem for found in everybody if not found.joined.is_set()}.items())

    async def rounds(self, on_round: Callable[[], None]) -> None:
        """Run all rounds, and wait for the last one. `on_round` is called after each."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._options.for_s if self._options.for_s else None
        done = 0
        while (not self._options.count or done < self._options.count) and (end is None or loop.time() < end):
            if self._problem is not None:
                raise self._problem
            for probe in self.prober.begin_round(loop.time()):
                self._send(probe)
            done += 1
            await self._watch(loop.time() + self._options.interval_s)
            on_round()
        await self._watch(loop.time() + self._options.timeout_s + LOOK_S, until_quiet=True)
        on_round()

    async def _watch(self, until: float, *, until_quiet: bool = False) -> None:
        loop = asyncio.get_running_loop()
        while (left := until - loop.time()) > 0 and not (until_quiet and not self.prober.pending):
            await asyncio.sleep(min(LOOK_S, left))
            self.prober.expire(loop.time())
        self._tell()

    def _tell(self) -> None:
        findings = self.prober.findings()
        if {finding.members for finding in findings} != {finding.members for finding in self._findings}:
            self._findings = findings
            self.alarms += bool(findings)
            self._on_findings(findings)

    def _send(self, probe: Probe) -> None:
        now_us = time.time_ns() // 1000
        body = BODY.pack(self._run, probe.number)
        derived = xxhash.xxh3_64_intdigest(body) & MAX_ID
        kind, flags = (Kind.CHAT, FLAGS) if probe.to_user else (Kind.ROOM, FLAGS | Flag.TO_ROOM)
        record = encode(kind, probe.key, body, derived, sender=self._uin, flags=flags)
        stamped = with_stamp(record, Stamp(Hop.PUBLISHER, 0, 0, now_us, now_us))
        self._proxies[probe.proxy.endpoint].send(probe.number, stamped)

    def _arrived(self, gateway: int, record: bytes) -> None:
        now_us = time.time_ns() // 1000
        try:
            body = decode_record(record).body
            run, number = BODY.unpack(body)
        except (MalformedData, struct.error):
            return
        if run == self._run:
            stamps = stamps_of(record)
            self.prober.arrived(number, gateway, [*stamps, Stamp(Hop.SUBSCRIBER, 0, 0, now_us, now_us)] if stamps else None)

    def _on_view(self, view: View) -> None:
        try:
            self.prober.set_view(view)
        except InvalidArgument as error:
            self._problem = error
            return
        proxies = {member.endpoint: member for member in self.prober.proxies}
        gateways = {member.endpoint: member for member in self.prober.gateways}
        for endpoint in [endpoint for endpoint in self._proxies if endpoint not in proxies]:
            self._end(self._proxies.pop(endpoint))
        for endpoint in [endpoint for endpoint in self._subscribers if endpoint not in gateways]:
            self._end(self._subscribers.pop(endpoint))
        for endpoint, proxy in proxies.items():
            if endpoint not in self._proxies:
                self._proxies[endpoint] = _ProxyStream(proxy, self._channels, self.prober.lost, self.prober.not_taken)
        for endpoint, gateway in gateways.items():
            if endpoint not in self._subscribers:
                self._subscribers[endpoint] = _Subscriber(gateway, self._uin, self._channels, self._arrived)
            self._subscribers[endpoint].join(self.prober.rooms.values())
        for user in self._users.keys() - self.prober.users:
            self._end(self._users.pop(user))
        for user in self.prober.users - self._users.keys():
            gateway = gateways[user.gateway]
            self._users[user] = _Subscriber(gateway, user.uin, self._channels, self._arrived, chat=True)
            self._users[user].join(())

    def _end(self, stream: _ProxyStream | _Subscriber) -> None:
        task = asyncio.create_task(stream.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self) -> None:
        await self._discovery.close()
        for proxy in self._proxies.values():
            self._end(proxy)
        for subscriber in (*self._subscribers.values(), *self._users.values()):
            self._end(subscriber)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._zookeeper.close()
        await self._channels.close()
