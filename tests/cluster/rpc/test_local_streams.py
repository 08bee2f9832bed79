"""Framed streams inside a process: what differs from those between processes. `test_framed.py` has what does not."""

from __future__ import annotations

import asyncio
import contextvars
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cluster.links.api import Peer
from cluster.listeners.call_guard import CallGuard
from cluster.listeners.streams import framed_listener
from cluster.rpc import framed_listener as listener_module
from cluster.rpc.framed import Framed, FramedCall, FramedHandler
from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.frames import Hello
from cluster.rpc.local_streams import LocalCall, LocalStreams, connection
from cluster.rpc.methods import STORE
from cluster.settings.options import ClusterOptions
from cluster.trust.audit import Audit
from pixiu.ids import EndpointID
from pixiu.rpc.duplex import Duplex, Outbox, StreamEnded, ask
from pixiu.rpc.tls import Tls
from pixiu.rpc.turn_loop import TurnLoop
from tests.cluster.rpc import framed_world
from tests.cluster.rpc.framed_world import METHOD, call_to, serving

MAX_BYTES = 1 << 20


async def echo(carrier: FramedHandler[bytes, bytes]) -> None:
    while (message := await carrier.read()) is not None:
        await carrier.write(message)


def framed(role: str, streams: LocalStreams | None) -> Framed:
    made = Framed(role, 1, lambda _role: b"x" * 32, MAX_BYTES)
    made.local = streams
    return made


class Noted(asyncio.Protocol):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def data_received(self, data: bytes) -> None:
        self.said.append(data)

    def pause_writing(self) -> None:
        self.said.append("pause")

    def resume_writing(self) -> None:
        self.said.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.said.append("lost")


async def test_a_role_of_the_process_is_called_without_a_port_and_all_others_with_one() -> None:
    streams, listener = LocalStreams(), FramedListener()
    listener.serve(METHOD, bytes, echo)
    listener.serve_locally(streams, 7)
    calls = framed("proxy", streams)
    here = calls.call(Peer(EndpointID(7), "xiu", "192.0.2.1", 1), METHOD, bytes)
    assert isinstance(here, LocalCall)
    async with here as call:
        assert await ask(call, b"hello", 30.0) == b"hello"
    for elsewhere in (
        calls.call(Peer(EndpointID(8), "xiu", "192.0.2.1", 1), METHOD, bytes),
        framed("proxy", None).call(Peer(EndpointID(7), "xiu", "192.0.2.1", 1), METHOD, bytes),
    ):
        assert type(elsewhere) is FramedCall
    await listener.close()
    assert streams.listeners == {}
    late = LocalCall(streams, 7, "xiu", Hello(METHOD, "proxy", 1), bytes, MAX_BYTES)
    with pytest.raises(StreamEnded, match="has ended"):
        await late.opened(30.0)


async def test_it_needs_no_key_and_no_certificate_but_its_role_and_method_are_checked(tmp_path: Path) -> None:
    guard = CallGuard("xiu", cast(Tls, SimpleNamespace(folder=tmp_path)), Audit(None))
    listener = framed_listener("xiu", ClusterOptions(), None, guard, lambda: None, lambda _method, _error: None)
    listener._keys, listener._context = lambda _role: (b"secret" * 6,), ssl.create_default_context
    streams = LocalStreams()
    listener.serve(STORE, bytes, echo)
    listener.serve_locally(streams, 7)
    target = Peer(EndpointID(7), "xiu", "192.0.2.1", 1)
    async with framed("proxy", streams).call(target, STORE, bytes) as call:
        assert await ask(call, b"hello", 30.0) == b"hello"
    refused = (("relay", STORE, "relay may not call"), ("proxy", "/x/y", "may not call"))
    for role, method, words in refused:
        async with framed(role, streams).call(target, method, bytes) as call:
            with pytest.raises(StreamEnded, match=words) as caught:
                await call.opened(30.0)
            assert caught.value.refused
    assert (listener.served, listener.refused) == (1, 2)
    await listener.close()


async def test_strangers_shut_no_role_of_the_process_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_STRANGERS", 0)
    streams, listener = LocalStreams(), FramedListener()
    listener.serve(METHOD, bytes, echo)
    listener.serve_locally(streams, 7)
    async with LocalCall(streams, 7, "xiu", Hello(METHOD, "proxy", 1), bytes, MAX_BYTES) as call:
        assert await ask(call, b"hello", 30.0) == b"hello"
        assert not listener._strangers
        monkeypatch.setattr(listener_module, "MAX_STREAMS", 1)
        async with LocalCall(streams, 7, "xiu", Hello(METHOD, "proxy", 1), bytes, MAX_BYTES) as another:
            with pytest.raises(StreamEnded):
                await another.opened(30.0)
    await listener.close()


async def test_a_stream_is_served_in_the_context_of_the_role_that_serves() -> None:
    role: contextvars.ContextVar[str] = contextvars.ContextVar("role", default="nobody")
    seen: list[str] = []

    async def serve(carrier: FramedHandler[bytes, bytes]) -> None:
        seen.append(role.get())
        await echo(carrier)

    streams, listener = LocalStreams(), FramedListener()
    listener.serve(METHOD, bytes, serve)

    async def start() -> None:
        role.set("xiu")
        listener.serve_locally(streams, 7)

    await asyncio.create_task(start())
    role.set("proxy")
    for _ in range(2):
        async with LocalCall(streams, 7, "xiu", Hello(METHOD, "proxy", 1), bytes, MAX_BYTES) as call:
            assert await ask(call, b"hello", 30.0) == b"hello"
    assert seen == ["xiu", "xiu"]
    await listener.close()


async def test_who_does_not_read_holds_the_writer_back_and_gets_everything_later() -> None:
    one, other = connection()
    writer, reader = Noted(), Noted()
    one.set_protocol(writer)
    other.set_protocol(reader)
    one.set_write_buffer_limits(high=1000)
    one.write(b"a" * 600)
    assert (writer.said, reader.said) == ([], []), "reading has not begun"
    one.write(b"b" * 600)
    assert writer.said == ["pause"]
    other.resume_reading()
    assert (writer.said, reader.said) == (["pause", "resume"], [b"a" * 600, b"b" * 600])
    other.pause_reading()
    one.write(b"c")
    one.write_eof()
    one.write(b"never")
    assert reader.said[2:] == []
    other.resume_reading()
    await asyncio.sleep(0)
    assert reader.said[2:] == [b"c", "lost"]
    assert writer.said[-1] == "lost"
    assert one.is_closing()
    assert other.is_closing()


async def test_an_end_of_one_side_leaves_time_for_what_the_other_one_wrote_before() -> None:
    one, other = connection()
    first, second = Noted(), Noted()
    one.set_protocol(first)
    other.set_protocol(second)
    other.resume_reading()
    other.write(b"the last word")
    one.close()
    await asyncio.sleep(0)
    assert (first.said, second.said) == ([], [])
    one.resume_reading()
    await asyncio.sleep(0)
    assert first.said == [b"the last word", "lost"]
    assert second.said == ["lost"]
    one.abort()
    await asyncio.sleep(0)
    assert second.said == ["lost"], "once"


class Counting(TurnLoop):
    """Counts its turns."""

    turns = 0

    def _run_once(self) -> None:
        self.turns += 1
        super()._run_once()  # type: ignore[misc]


def test_a_question_and_its_answer_take_no_turn_of_the_loop_for_each_side() -> None:
    """Asked by whom the answer before has reached. The bound of rounds in a turn is all that ends one."""
    asked = 200

    async def answer(carrier: FramedHandler[bytes, bytes]) -> None:
        answers = Outbox[bytes](10)

        def take(message: bytes) -> None:
            assert answers.put(message)

        await Duplex(carrier, take, answers.give, work=answers.work).run()

    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Counting)
        async with serving(answer) as (_, port), call_to(port) as carrier:
            questions, before = Outbox[bytes](10), 0

            def take(message: bytes) -> None:
                if int(message) == asked:
                    stream.end("enough")
                else:
                    questions.put(b"%d" % (int(message) + 1))

            stream = Duplex(carrier, take, questions.give, work=questions.work)
            await carrier.opened(30.0)
            questions.put(b"0")
            before = loop.turns
            await stream.run()
            return loop.turns - before

    framed_world.INSIDE = LocalStreams()
    try:
        with asyncio.Runner(loop_factory=Counting) as runner:
            assert runner.run(main()) < asked / 2
    finally:
        framed_world.INSIDE = None
