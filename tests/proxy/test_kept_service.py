"""The shell of kept messages: questions of a turn go together, a silent router refuses all that wait, a number is borrowed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest
import structlog

from cluster.links.api import PeerState
from cluster.settings.options import ClusterOptions
from cluster.wire.v1 import kept_pb2, kept_pb2_grpc
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.errors import Overloaded, Refusal
from pixiu.ids import EndpointID
from proxy import kept_events as ev
from proxy import mail_events as mail_ev
from proxy.kept import service as module
from proxy.kept.service import KeptService
from proxy.options import Options
from tests.support.waiting import until

ONE = RoleLayout(1, 1, 1)


class Router(kept_pb2_grpc.KeptServicer):
    """Session 7 has a filter for everything."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    async def Match(self, request: kept_pb2.KeptQuestions, context: object) -> kept_pb2.KeptAnswers:
        self.calls.append(len(request.questions))
        return kept_pb2.KeptAnswers(answers=[kept_pb2.KeptAnswer(sessions=[7]) for _ in request.questions])


class Shell:
    """A service whose core and mail core note what they get."""

    def __init__(self, port: int) -> None:
        node = Node("router", 0, 0, NodeState.RUNNING, "127.0.0.1", port, 0, EndpointID(9), 0, "test", "", 0)
        self.view = View(Layout(1, {"router": ONE, "xiu": ONE, "pi": ONE}), (node,) if port else ())
        self.told: list[object] = []
        self.mailed: list[object] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.leases: list[int | Overloaded] = [Overloaded("none is free", 10), 12, 13]
        self.held = {12: 1 << 62, 13: 1 << 62}
        context = SimpleNamespace(
            view=self.view, links=SimpleNamespace(state=lambda _: PeerState.ALIVE), tls=None, now=time.monotonic,
            cluster=ClusterOptions(), options=Options(), log=structlog.get_logger(),
        )  # fmt: skip
        mail = SimpleNamespace(next_stream=iter(range(1, 99)).__next__, runner=SimpleNamespace(step=self.mailed.append))
        self.service = KeptService(
            cast(Any, context), cast(Any, mail), self.told.append, self.spawn, self.acquire, lambda worker: self.held.get(worker, 0)
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    async def acquire(self) -> tuple[int, int, int]:
        found = self.leases.pop(0)
        if isinstance(found, Overloaded):
            raise found
        return found, 0, self.held[found]


@pytest.fixture
async def router() -> AsyncIterator[tuple[Router, int]]:
    server, servicer = grpc.aio.server(), Router()  # type: ignore[abstract]
    kept_pb2_grpc.add_KeptServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, port
    await server.stop(None)


def ask(shell: Shell, *numbers: int) -> None:
    shell.service.ask(ev.AskKept([ev.Question(number, 40, b"room/40", 0) for number in numbers]))


async def test_questions_of_a_turn_and_those_that_come_during_a_call_go_together(router: tuple[Router, int]) -> None:
    servicer, port = router
    shell = Shell(port)
    ask(shell, 1)
    ask(shell, 2)
    await asyncio.sleep(0)
    ask(shell, 3)
    ask(shell, 4)
    await until(lambda: len(shell.told) == 2, "both answers")
    assert shell.told == [ev.KeptMatched([(1, [7]), (2, [7])]), ev.KeptMatched([(3, [7]), (4, [7])])]
    assert servicer.calls == [2, 2]
    await shell.service.stop()


async def test_a_router_that_is_away_refuses_what_waits_and_the_next_question_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MATCH_S", 0.05)
    shell = Shell(0)
    ask(shell, 1)
    await asyncio.sleep(0)
    ask(shell, 2)
    await until(lambda: shell.told, "a refusal")
    (refused,) = shell.told
    assert isinstance(refused, ev.KeptRefused)
    assert (list(refused.numbers), refused.why.code) == ([1, 2], "UNAVAILABLE")
    assert refused.why.retry_after_ms
    ask(shell, 3)
    await until(lambda: len(shell.told) == 2, "a further refusal")
    await shell.service.stop()


async def test_the_first_message_takes_a_worker_number_and_one_that_is_lost_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEASE_PAUSE_S", 0.001)
    shell = Shell(0)
    assert not shell.tasks
    mail = ev.KeptMail(1, mail_ev.RoomMail(40, b"", [7]), time.monotonic() + 1000)
    shell.service.store(ev.StoreKept([mail]))
    shell.service.store(ev.StoreKept([mail]))
    await until(lambda: shell.mailed, "the writer opens")
    opened, received = shell.mailed
    assert isinstance(opened, mail_ev.WriterOpened)
    assert isinstance(received, mail_ev.RoomMailReceived)
    assert (opened.worker, opened.own, len(received.mails), len(shell.tasks)) == (12, True, 2, 1)
    del shell.held[12]
    shell.service.runner.step(mail_ev.EndWriter(opened.stream, Refusal("STALE_WRITER", "taken")))
    await until(lambda: len(shell.mailed) == 4, "the next stream")
    await until(lambda: shell.service.worker == 13, "another number")
    await shell.service.stop()


async def test_messages_are_kept_where_there_are_routers_and_both_stores() -> None:
    shell = Shell(0)
    layouts = [{"router": ONE, "xiu": ONE, "pi": ONE}, {"router": ONE, "xiu": ONE}, {"xiu": ONE, "pi": ONE}]
    for roles in layouts:
        shell.service.on_view(View(Layout(1, roles), ()))
    assert shell.told == [ev.KeptAvailable(True), ev.KeptAvailable(False), ev.KeptAvailable(False)]
    await shell.service.stop()
