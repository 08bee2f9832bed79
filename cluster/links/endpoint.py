"""The shell of a process's links: one UDP socket in the event loop, streams, one timer.

    readable: receive up to 64 datagrams ─► handlers run ─► callbacks for the end of the input ─► data leaves
              ─► acknowledgements leave ─► roles of the same process have their turns, until nothing waits for any of them

All of this happens in one iteration of the event loop: a further iteration costs a system call and as much again as the work for
one message.

Source: docs/links.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import ipaddress
import os
import random
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Final

from cluster.links.api import LinkHandler, Links, Peer, PeerState
from cluster.links.link import MIN_DELAY_S
from cluster.links.local import Delivery, LocalSwitch
from cluster.links.local_core import LocalCore
from cluster.links.options import LinkOptions
from cluster.links.peer.sender import Address
from cluster.links.refusals import no_warning
from cluster.links.stats import LinkStats, PeerStats
from cluster.links.stream import IncomingStream, LinkStreams, OutgoingStream
from cluster.rpc.framed import Framed, FramedCall
from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.methods import LINK
from cluster.trust.key_ring import KeyRing
from pixiu.errors import ConfigurationError, NotConnected
from pixiu.ids import EndpointID
from pixiu.placement.link_quality import Quality
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.turn_loop import call_at_end

DRAIN_DATAGRAMS: Final = 64
"""Datagrams received in one wake-up, so that a flood does not starve the rest of the loop."""
DRAIN_LATE: Final = 1 << 16
"""The same after a pause of the process: more than fits into the socket's buffer."""
MAX_BACKLOG: Final = 4096
"""Datagrams that wait until the socket takes them again; beyond this the oldest are lost."""
NO_BUFFER_WAIT_S: Final = 0.001
INTRODUCTION_S: Final = 3.0
"""Longest wait for a peer that answers but does not know this process yet, seconds. Policy: after that it is not waited for."""
FIRST_ANSWER_S: Final = 0.25
"""Longest wait for a peer that does not answer, seconds. Policy: the same."""
INTRODUCTION_PAUSE_S: Final = 0.02
FIRST_RESOLVE_BACKOFF_S: Final = 1.0
MAX_RESOLVE_BACKOFF_S: Final = 30.0


class Endpoint(Links):
    """The links of one process. Use it from its event loop only."""

    def __init__(
        self,
        endpoint: EndpointID,
        options: LinkOptions,
        handler: LinkHandler,
        *,
        layout_version: Callable[[], int] = lambda: 0,
        on_warning: Callable[..., None] = no_warning,
        udp_address_of: Callable[[EndpointID], tuple[str, int] | None] = lambda _id: None,
        knows: Callable[[EndpointID], bool] = lambda _id: True,
        ring: KeyRing | None = None,
        role: str = "",
        framed: Framed | None = None,
        switch: LocalSwitch | None = None,
    ) -> None:
        """Create the links of a process.

        `on_warning(event, **fields)` logs. `knows`: returns True if a sender that is not a peer belongs to the cluster. `ring`:
        keys of datagrams, for a process of the role `role`; None: datagrams are not authenticated. `udp_address_of`: returns the
        address of a peer for datagrams; None: its host and port. `framed`: opens streams to peers; None: only they open some.
        `switch`: of a process with several roles: links between them are calls.

        Raises `ConfigurationError` and `InvalidArgument`.
        """
        options.validate()
        self._core = LocalCore(
            endpoint,
            options,
            handler,
            switch or LocalSwitch(),
            layout_version=layout_version,
            on_warning=on_warning,
            knows=knows,
            ring=ring,
            role=role,
        )
        self.late = False
        self._on_warning = on_warning
        self._udp_address_of, self._framed = udp_address_of, framed
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._buffer = memoryview(bytearray(self._core.max_datagram_bytes + 1))
        self._timer: asyncio.TimerHandle | None = None
        self._flush_scheduled = False
        self._end_scheduled = False
        self._in_turn = False
        """True if data leaves at the end of the current call."""
        self._in_input = False
        """True while that call hands received data over."""
        self._hurry: Callable[[float], None] | None = None
        self._at_end: list[Callable[[], None]] = []
        self._backlog: deque[tuple[bytes, Address]] = deque()
        self._send_errors: dict[str, int] = {}
        self._receive_errors: dict[str, int] = {}
        self._peers: dict[EndpointID, Peer] = {}
        self._udp: dict[EndpointID, tuple[str, int]] = {}
        """Host, which may be a name, and port for each peer's datagrams."""
        self._addresses: dict[tuple[str, int], Address] = {}
        self._resolver: asyncio.Task[None] | None = None
        self._outgoing: dict[EndpointID, OutgoingStream] = {}
        self._incoming: dict[EndpointID, IncomingStream] = {}
        self._closing: set[asyncio.Task[None]] = set()

    # ---- life cycle ---------------------------------------------------------------------------------------------------

    def bind(self, host: str, port: int) -> int:
        """Bind the UDP port (0: any) and return it. Raises `ConfigurationError` if that fails."""
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
            )[0]
            sock = socket.socket(family, kind, proto)
        except OSError as error:
            raise ConfigurationError(f"cannot listen on UDP {host}:{port}: {error}; give an address of this machine") from error
        try:
            sock.setblocking(False)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, self._core.port.options.receive_buffer_bytes)
            sock.bind(address)
        except OSError as error:
            sock.close()
            raise ConfigurationError(
                f"cannot listen on UDP {host}:{port}: {error.strerror}; stop the process that has it, or use port 0 for any"
            ) from error
        self._socket = sock
        self._core.receive_buffer_given(sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
        return int(sock.getsockname()[1])

    def pace(self, patient: Callable[[socket.socket], None], hurry: Callable[[float], None]) -> None:
        """Make this process's socket patient, if it is bound, and call `hurry` when somebody waits for sent or received data. See
        `cluster.core.pacing`."""
        if self._socket is not None:
            patient(self._socket)
            self._hurry = hurry

    def role_of(self, id_: EndpointID) -> str:
        """The role of a process: of one that is in this process, that its tags have proved, or a peer's; empty if none is known."""
        proven = self.role_inside(id_) or self._core.codec.proven_roles.get(id_)
        if proven:
            return proven
        peer = self._peers.get(id_)
        return peer.role if peer is not None else ""

    def role_inside(self, id_: EndpointID) -> str:
        """The role of a process that is in this one, which never changes; empty for all others."""
        return self._core.role_of(id_)

    def set_ring(self, ring: KeyRing) -> None:
        """Replace the keys that sign and check datagrams."""
        self._core.codec.set_ring(ring)

    def attach(self, listener: FramedListener) -> None:
        """Serve the streams that peers open."""
        listener.serve(LINK, bytes, LinkStreams(self).serve)

    async def start(self) -> None:
        """Start receiving and heartbeating. Raises `NotConnected` before `bind`."""
        if self._socket is None:
            raise NotConnected("call bind() before start()")
        self._loop = asyncio.get_running_loop()
        # A copy, which nothing else enters: what other roles of the process hand over is handled, and logged, as this one's.
        self._core.port.switch.attach(self._core.port, self, contextvars.copy_context().run)
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self.set_peers(list(self._peers.values()))
        self._poll()

    async def introduced(self) -> None:
        """Wait until every peer that answers knows this process: a peer that has not read of it yet refuses its data."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (waited := loop.time() - began) < INTRODUCTION_S and self._core.introduce(loop.time(), waited < FIRST_ANSWER_S):
            self._transmit()
            await asyncio.sleep(INTRODUCTION_PAUSE_S)

    async def close(self) -> None:
        """Send queued data as far as possible, settle the rest as not handled, close the socket and all streams."""
        if self._loop is not None and self._socket is not None:
            now = self._loop.time()
            self._core.flush(now, every=True)
            self._core.acknowledge(now, every=True)
            self._transmit()
            self._core.port.switch.work(now)
            self._core.close()
            self._core.dispatch(now)
            self._core.close_port(now)
            work(self._core.port.switch, self._loop)
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._closing)
        if self._resolver is not None:
            self._resolver.cancel()
            tasks.append(self._resolver)
        for incoming in list(self._incoming.values()):
            incoming.cancel()
        await asyncio.gather(*(stream.close() for stream in self._outgoing.values()), *tasks, return_exceptions=True)
        self._outgoing.clear()
        self._loop = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # ---- for roles --------------------------------------------------------------------------------------------------------

    def set_peers(self, peers: Iterable[Peer]) -> None:
        """Set the peers to heartbeat and send to, as `Links.set_peers`."""
        self._peers = {peer.id: peer for peer in peers if peer.id != self._core.endpoint}
        self._udp = {id_: self._udp_address_of(id_) or (peer.host, peer.port) for id_, peer in self._peers.items()}
        loop = self._loop
        if loop is None:
            return
        located: dict[EndpointID, tuple[Peer, Address | None]] = {}
        for peer in self._peers.values():
            where = self._udp[peer.id]
            located[peer.id] = (peer, _literal(*where) or self._addresses.get(where))
        now = loop.time()
        self._core.set_peers(located, now)
        for id_ in [id_ for id_ in self._outgoing if id_ not in self._peers and not self._core.stream_wanted(id_)]:
            self._close_stream(id_)
        if any(address is None for _, address in located.values()) and (self._resolver is None or self._resolver.done()):
            self._resolver = loop.create_task(self._resolve())
        self._schedule_end()

    def set_attachment(self, peer: EndpointID, attachment: bytes) -> None:
        """Set a peer's attachment, as `Links.set_attachment`. Raises `InvalidArgument` above 512 bytes."""
        self._core.set_attachment(peer, attachment, self._now())
        self._schedule_end()

    def send_records(
        self,
        peer: EndpointID,
        records: list[bytes],
        lane: int = 1,
        token: int = 0,
        urgent: bool = False,
        more: bool = False,
    ) -> None:
        """Queue a parcel of records, as `Links.send_records`."""
        now = monotonic()
        if urgent and self._hurry is not None and not self._core.role_of(peer):
            self._hurry(now)
        self._core.send_records(peer, records, lane, token, now, urgent, more)
        if not (self._flush_scheduled or self._in_turn):
            self._schedule_flush()

    def send_control(self, peer: EndpointID, messages: list[bytes], token: int = 0) -> None:
        """Queue control messages, as `Links.send_control`."""
        now = monotonic()
        if self._hurry is not None and not self._core.role_of(peer):
            self._hurry(now)
        self._core.send_control(peer, messages, token, now)
        if not (self._flush_scheduled or self._in_turn):
            self._schedule_flush()

    def state(self, peer: EndpointID) -> PeerState:
        """State of a peer, as `Links.state`."""
        return self._core.state(peer)

    def quality(self, peer: EndpointID) -> Quality:
        """Quality of a peer's answers to heartbeats, as `Links.quality`."""
        return self._core.quality(peer)

    def layout_of(self, peer: EndpointID) -> int:
        """The layout version in the last datagram of a peer; 0 before the first."""
        return self._core.layout_of(peer)

    def stats(self) -> LinkStats:
        """The counters. Reads the kernel's count of drops from /proc if available."""
        return self._with_socket(self._core.stats())

    def stats_by_peer(self) -> tuple[LinkStats, Iterator[tuple[EndpointID, PeerStats]]]:
        """The counters in parts, as `LinkCore.stats_by_peer`."""
        stats, peers = self._core.stats_by_peer()
        return self._with_socket(stats), peers

    def peer_states(self) -> Counter[PeerState]:
        """Number of peers in each state."""
        return self._core.peer_states()

    def tell_waits(self, waited: Callable[[float], None]) -> None:
        """Set a function to be called whenever data leaves for a peer, with the time that its first item had waited, seconds."""
        self._core.outputs.waited = waited

    def _with_socket(self, stats: LinkStats) -> LinkStats:
        return replace(
            stats,
            send_errors=dict(self._send_errors),
            receive_errors=dict(self._receive_errors),
            kernel_drops=self._kernel_drops(),
            receive_buffer_bytes=self._core.receive_buffer_bytes,
        )

    def _kernel_drops(self) -> int:
        if self._socket is None:
            return 0
        table = "udp6" if self._socket.family == socket.AF_INET6 else "udp"
        inode = str(os.fstat(self._socket.fileno()).st_ino)
        with contextlib.suppress(OSError, ValueError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                columns = line.split()
                if len(columns) >= 13 and columns[9] == inode:
                    return int(columns[12])
        return 0

    # ---- turns ----------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._loop.time() if self._loop is not None else 0.0

    def _readable(self) -> None:
        loop, sock = self._loop, self._socket
        if loop is None or sock is None:
            return
        now = loop.time()
        pauses = self._core.pauses
        self.late = pauses.is_over(now, self._core.next_deadline())
        pauses.turn(now)
        self._in_turn = self._in_input = True
        try:
            self._receive_all(sock, now)
            if self._core.urgent_came:
                self._core.urgent_came = False
                if self._hurry is not None:
                    self._hurry(now)
            if self._core.has_events:
                self._core.dispatch(now)
        finally:
            self._in_input = self.late = False
            try:
                self._act_at_end(loop)
            finally:
                self._in_turn = False
                self._end_of_turn()

    def _receive_all(self, sock: socket.socket, now: float) -> None:
        receive_into, buffer, receive = sock.recvfrom_into, self._buffer, self._core.receive
        for _ in range(DRAIN_LATE if self.late else DRAIN_DATAGRAMS):
            try:
                # The buffer is a byte longer than any datagram: one that fills it was cut off, and is refused as oversized.
                size, address = receive_into(buffer)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._count(self._receive_errors, error)
                continue
            receive(bytes(buffer[:size]), address, now)

    def _act_at_end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the handlers' callbacks for the end of the input. An exception in one does not stop the others, as with
        `call_soon`."""
        at_end, self._at_end = self._at_end, []
        for act in at_end:
            try:
                act()
            except Exception as error:
                loop.call_exception_handler({"message": f"Exception at the end of a link's input: {act!r}", "exception": error})

    def in_turn(self, act: Callable[[], None]) -> None:
        """Call this, then send at once everything that it queued, as `Links.in_turn`."""
        if self._in_turn:
            act()
            return
        self._in_turn = True
        try:
            act()
        finally:
            self._in_turn = False
            self._flush()

    def at_end_of_input(self, act: Callable[[], None]) -> bool:
        """Call this before queued data leaves, as `Links.at_end_of_input`."""
        if self._in_input:
            self._at_end.append(act)
        return self._in_input

    def _after_input(self) -> None:
        loop = self._loop
        if loop is None:
            return
        if self._core.has_events:
            self._core.dispatch(loop.time())
        # After all callbacks that handlers scheduled: data that they flush leaves before the acknowledgements.
        self._schedule_end()

    def _schedule_end(self) -> None:
        if self._loop is not None and not self._end_scheduled:
            self._end_scheduled = True
            self._loop.call_soon(self._end_of_turn)

    def _schedule_flush(self) -> None:
        if self._loop is not None and not self._flush_scheduled and not self._in_turn:
            self._flush_scheduled = True
            call_at_end(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        loop = self._loop
        if loop is None:
            return
        if self._core.flush_locally():
            work(self._core.port.switch, loop)
            return
        if not self._backlog:
            # While the socket takes nothing, new data waits in the bounded queues of the links.
            self._core.flush(loop.time())
        self._finish()

    def _end_of_turn(self) -> None:
        self._end_scheduled = False
        loop = self._loop
        if loop is None:
            return
        now = loop.time()
        if not self._backlog:
            self._core.flush(now)
        self._core.acknowledge(now)
        self._finish()

    def _poll(self) -> None:
        self._timer = None
        loop = self._loop
        if loop is None:
            return
        now = loop.time()
        if self._core.pauses.is_over(now, self._core.next_deadline()):
            self._readable()  # what came during a pause is told from what comes after the heartbeats that end it
        self._core.pauses.turn(now)
        self._core.poll(now)
        if self._core.has_unacknowledged:
            self._after_input()
        self._finish()

    def _finish(self) -> None:
        """Give the core's output to the sockets, report events to the handler, set the timer."""
        self._transmit()
        loop = self._loop
        if loop is None:
            return
        now = loop.time()
        if self._core.has_events:
            self._core.dispatch(now)
            if self._core.has_events:
                self._schedule_flush()
        deadline = max(self._core.next_deadline(), now + MIN_DELAY_S)
        timer = self._timer
        if timer is None or deadline < timer.when():
            if timer is not None:
                timer.cancel()
            self._timer = loop.call_at(deadline, self._poll) if deadline < float("inf") else None
        work(self._core.port.switch, loop)

    def take_local(self, now: float, most: int, done: list[Delivery]) -> None:
        """Handle what other roles of this process sent, as `_readable` handles datagrams; `LocalSwitch` calls this."""
        loop = self._loop
        if loop is None:
            return
        self._in_turn = self._in_input = True
        try:
            self._core.port.take(now, most, done)
        finally:
            self._in_input = False
            try:
                if self._at_end:
                    self._act_at_end(loop)
            finally:
                self._in_turn = False
                if not self._core.flush_locally():
                    self._flush()

    def _transmit(self) -> None:
        outputs = self._core.outputs
        if outputs.datagrams:
            datagrams, outputs.datagrams = outputs.datagrams, []
            if self._backlog:
                self._hold(datagrams)
            else:
                self._send(datagrams)
        if outputs.streams or outputs.frames or outputs.replies or outputs.resets:
            self._transmit_streams()

    def _send(self, datagrams: list[tuple[bytes, Address]]) -> None:
        sock = self._socket
        if sock is None:
            return
        send = sock.sendto
        for at, (data, address) in enumerate(datagrams):
            try:
                send(data, address)
            except (BlockingIOError, InterruptedError):
                self._hold(datagrams[at:])
                if self._loop is not None:
                    self._loop.add_writer(sock.fileno(), self._writable)
                return
            except OSError as error:
                if error.errno == errno.ENOBUFS and self._loop is not None:
                    self._hold(datagrams[at:])
                    self._loop.call_later(NO_BUFFER_WAIT_S, self._writable)
                    return
                self._count(self._send_errors, error)

    def _hold(self, datagrams: list[tuple[bytes, Address]]) -> None:
        self._backlog.extend(datagrams)
        over = len(self._backlog) - MAX_BACKLOG
        if over > 0:
            self._send_errors["backlog"] = self._send_errors.get("backlog", 0) + over
            for _ in range(over):
                self._backlog.popleft()

    def _writable(self) -> None:
        if self._loop is None or self._socket is None:
            return
        self._loop.remove_writer(self._socket.fileno())
        datagrams = list(self._backlog)
        self._backlog.clear()
        self._send(datagrams)
        if not self._backlog:
            self._schedule_flush()

    @staticmethod
    def _count(counts: dict[str, int], error: OSError) -> None:
        name = errno.errorcode.get(error.errno or 0, "unknown")
        counts[name] = counts.get(name, 0) + 1

    # ---- names ----------------------------------------------------------------------------------------------------------

    async def _resolve(self) -> None:
        """Look up the addresses of peers that are given by name, until all are known."""
        backoff = Backoff(FIRST_RESOLVE_BACKOFF_S, MAX_RESOLVE_BACKOFF_S, random.random)
        while self._loop is not None:
            missing = [id_ for id_, where in self._udp.items() if _literal(*where) is None and where not in self._addresses]
            if not missing:
                return
            for id_ in missing:
                await self._look_up(id_)
            await asyncio.sleep(backoff.next_s())

    async def _look_up(self, id_: EndpointID) -> None:
        loop, sock, where = self._loop, self._socket, self._udp.get(id_)
        if loop is None or sock is None or where is None:
            return
        try:
            found = await loop.getaddrinfo(*where, family=sock.family, type=socket.SOCK_DGRAM)
        except OSError as error:
            self._on_warning("link_name_not_resolved", peer=id_, host=where[0], error=str(error))
            return
        address: Address = found[0][4]  # type: ignore[assignment]
        current = set(self._udp.values())
        self._addresses = {key: value for key, value in self._addresses.items() if key in current}
        self._addresses[where] = address
        if self._loop is not None:
            self._core.locate(id_, address, self._loop.time())
            self._schedule_end()

    # ---- streams --------------------------------------------------------------------------------------------------------

    def _transmit_streams(self) -> None:
        outputs = self._core.outputs
        resets, outputs.resets = outputs.resets, []
        wanted, outputs.streams = outputs.streams, []
        frames, outputs.frames = outputs.frames, []
        replies, outputs.replies = outputs.replies, []
        for id_ in resets:
            if id_ in self._outgoing:
                self._outgoing[id_].reset()
        for id_ in wanted:
            self._open_stream(id_)
        for id_, frame in frames:
            if id_ in self._outgoing:
                self._outgoing[id_].send(frame)
        for id_, frame in replies:
            if id_ in self._incoming:
                self._incoming[id_].send(frame)

    def _open_stream(self, id_: EndpointID) -> None:
        stream = self._outgoing.get(id_)
        if stream is None:
            peer, framed = self._peers.get(id_), self._framed
            if peer is None or framed is None or not peer.stream_port:
                return

            def opens() -> FramedCall[bytes, bytes]:
                return framed.call(peer, LINK, bytes)

            stream = OutgoingStream(id_, opens, self._on_answer, self._on_stream_state, self._core.stream_wanted)
            self._outgoing[id_] = stream
        stream.need()

    def _close_stream(self, id_: EndpointID) -> None:
        stream = self._outgoing.pop(id_)
        if self._loop is not None:
            task = self._loop.create_task(stream.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _on_answer(self, id_: EndpointID, data: bytes) -> None:
        if self._loop is not None:
            self._core.receive_frame(data, id_, "stream", self._loop.time())
            self._after_input()

    def _on_stream_state(self, id_: EndpointID, up: bool) -> None:
        if self._loop is not None:
            self._core.stream_connected(id_, up, self._loop.time())
            self._schedule_end()

    def stream_frame(self, data: bytes, stream: IncomingStream) -> bool:
        """Handle a frame on a stream that a peer opened. Returns False if it was refused and no frame has been good there yet."""
        if self._loop is None:
            return False
        source = self._core.receive_frame(data, stream.source, stream.name, self._loop.time())
        if source is None:
            return stream.source is not None
        if stream.source is None:
            stream.source = source
            old = self._incoming.get(source)
            self._incoming[source] = stream
            if old is not None:
                old.cancel()
        self._after_input()
        return True

    def stream_closed(self, stream: IncomingStream) -> None:
        """Handle the end of a stream that a peer opened."""
        if stream.source is not None and self._incoming.get(stream.source) is stream:
            del self._incoming[stream.source]


def work(switch: LocalSwitch, loop: asyncio.AbstractEventLoop) -> None:
    """Give the roles of a process their turns; what is beyond the bound waits for the next iteration of the loop."""
    if switch.working or not switch.ready:
        return
    try:
        switch.work(loop.time())
    finally:
        if switch.ready and not switch.continues:
            switch.continues = True
            loop.call_soon(_continue, switch, loop)


def _continue(switch: LocalSwitch, loop: asyncio.AbstractEventLoop) -> None:
    switch.continues = False
    work(switch, loop)


def _literal(host: str, port: int) -> Address | None:
    """The address of a host given in digits; None for a name."""
    try:
        return str(ipaddress.ip_address(host)), port
    except ValueError:
        return None
