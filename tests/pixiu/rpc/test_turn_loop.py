"""Ends of turns: after all that was ready, in the same turn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from pixiu.rpc.turn_loop import MAX_ROUNDS, TurnLoop, call_at_end


def run(*reads: Callable[[list[str]], object]) -> list[str]:
    """What a loop did whose sockets, one for each function, become readable together."""
    heard: list[str] = []

    async def main() -> None:
        loop, pairs = asyncio.get_running_loop(), [socket.socketpair() for _ in reads]
        for (here, there), read in zip(pairs, reads, strict=True):
            there.send(b"x")
            loop.add_reader(here, read, heard)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for here, there in pairs:
            loop.remove_reader(here)
            here.close()
            there.close()

    with asyncio.Runner(loop_factory=TurnLoop) as runner:
        runner.get_loop().set_exception_handler(lambda _loop, context: heard.append(str(context["exception"])))
        runner.run(main())
    return heard


def again(heard: list[str]) -> None:
    heard.append("again")
    call_at_end(lambda: again(heard))


def test_the_end_of_a_turn_comes_behind_all_reads_and_once_for_each_call() -> None:
    def read(heard: list[str]) -> None:
        heard.append("read")
        if heard == ["read"]:
            asyncio.get_running_loop().call_soon(heard.append, "next turn")
            call_at_end(lambda: heard.append("end"))

    assert run(read, read)[:4] == ["read", "read", "end", "next turn"]


def test_what_an_end_asks_for_comes_in_the_same_turn_within_a_bound() -> None:
    def read(heard: list[str]) -> None:
        if not heard:
            asyncio.get_running_loop().call_soon(heard.append, "next turn")
            call_at_end(lambda: again(heard))
        heard.append("read")

    heard = run(read)
    assert heard[: MAX_ROUNDS + 2] == ["read", *["again"] * MAX_ROUNDS, "next turn"]
    assert heard[MAX_ROUNDS + 2] == "again", "the rest comes in the next turn"


def test_a_function_that_fails_or_is_cancelled_stops_no_other() -> None:
    def read(heard: list[str]) -> None:
        if not heard:
            call_at_end(lambda: 1 / 0)
            call_at_end(lambda: heard.append("cancelled")).cancel()
            call_at_end(lambda: heard.append("end"))
        heard.append("read")

    assert run(read)[:3] == ["read", "division by zero", "end"]


def test_nothing_is_lost_where_nothing_is_read_or_the_loop_is_another_one() -> None:
    async def main() -> list[str]:
        heard: list[str] = []
        call_at_end(lambda: heard.append("end"))
        await asyncio.sleep(0)
        return heard

    for factory in (TurnLoop, asyncio.SelectorEventLoop):
        with asyncio.Runner(loop_factory=factory) as runner:
            assert runner.run(main()) == ["end"]
