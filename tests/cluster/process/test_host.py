"""The host of several roles, each played by the test: who starts, leaves and fails in which order, and what is reported."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from cluster.core import log
from cluster.process.host import EXIT_CRASH, EXIT_ENVIRONMENT, EXIT_OK, Host, Role
from cluster.process.role_run import Owner
from cluster.settings.options import ClusterOptions, PartitionedOptions
from pixiu.discovery.paths import DRAIN_ORDER
from pixiu.errors import ConfigurationError, Unavailable
from pixiu.rpc.tls import Tls


class Session:
    """The session of a role with the registry."""

    def __init__(self, roles: Sequence[str], cluster: ClusterOptions, options: Any, tls: Tls | None) -> None:
        self.roles = list(roles)
        self.ended: list[str] = []

    def end(self) -> None:
        self.ended.append(threading.current_thread().name)


class Run:
    """A run whose start, drain and errors the test decides."""

    all: dict[str, Run]

    def __init__(
        self, role: str, cluster: ClusterOptions, options: Any, identity: log.Identity, session: Session, owner: Owner
    ) -> None:
        self.name = f"{role}-{options.partition}"
        if options.audit_dir:
            raise ConfigurationError("audit_dir is not writable")
        self.owner, self.identity = owner, identity
        self.running = False
        self.may_start, self.leaving, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None
        self.session = session
        self.loop_errors: list[object] = []
        Run.all[self.name] = self

    async def run(self, service: object, membership: Any) -> None:
        membership(f"starts {self.name}")
        starting, leaving = asyncio.ensure_future(self.may_start.wait()), asyncio.ensure_future(self.leaving.wait())
        await asyncio.wait({starting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if self.error is None and self.may_start.is_set():
            self.running = True
            self.owner.registered()
            await leaving
            membership(f"drains {self.name}")
            await self.may_end.wait()
        starting.cancel()
        leaving.cancel()
        membership(f"ends {self.name}")
        if self.error is not None:
            raise self.error

    def start(self) -> None:
        self.may_start.set()

    def crash(self, error: Exception) -> None:
        self.error, self.running = error, False
        self.owner.end()
        self.may_end.set()

    def leave(self) -> None:
        self.leaving.set()

    def note_loop_lag(self, seconds: float) -> None:
        pass

    def loop_error(self, context: dict[str, Any]) -> None:
        self.loop_errors.append(context["message"])
        log.get_logger().error(log.LOOP_ERROR)


def options_of(role: str, partition: int, audit_dir: str) -> PartitionedOptions:
    return PartitionedOptions(partition=partition, audit_dir=audit_dir if role == "xiu" else "")


class Node:
    """A host, and what happened in it."""

    def __init__(self, names: tuple[str, ...], events: list[str], audit_dir: str) -> None:
        self.events = events
        self.names = names
        self.out = io.StringIO()
        log.configure("json", "info", self.out)
        roles = [
            Role(name, ClusterOptions(), options_of(name, int(number), audit_dir), lambda _context: Any)  # type: ignore[arg-type, return-value]
            for name, number in (each.split("-") for each in names)
        ]
        self.host = Host(roles, events.append)  # type: ignore[arg-type]
        self.running = asyncio.create_task(self.host.run())

    async def turn(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def started(self, *names: str) -> None:
        """Let these start, by default all."""
        await self.turn()
        for name in names or self.names:
            Run.all[name].start()
        await self.turn()

    async def ended(self) -> int:
        """Let all roles end that are asked to. Returns the exit code."""
        for run in Run.all.values():
            run.may_end.set()
        async with asyncio.timeout(60):
            return await self.running

    def lines(self, event: str) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self.out.getvalue().splitlines()) if line["event"] == event]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Run.all = {}
    monkeypatch.setattr("cluster.process.host.RoleRun", Run)
    monkeypatch.setattr("cluster.process.host.SharedSession", Session)
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    structlog.reset_defaults()


@asynccontextmanager
async def node(*names: str, audit_dir: str = "") -> Any:
    """audit_dir: of a Xiu, which cannot be made with one."""
    found = Node(names, [], audit_dir)
    try:
        yield found
    finally:
        found.running.cancel()
        await asyncio.gather(found.running, return_exceptions=True)


async def test_roles_start_together_and_drain_in_order_each_after_those_that_need_it() -> None:
    names = tuple(f"{role}-{number}" for role in reversed(DRAIN_ORDER) for number in (0, 1))
    async with node(*names) as found:
        await found.turn()
        assert found.events == [f"starts {name}" for name in names], "none waits for another"
        await found.started()
        found.events.clear()
        signal.raise_signal(signal.SIGTERM)
        for role in DRAIN_ORDER:
            await found.turn()
            assert found.events == [f"drains {role}-0", f"drains {role}-1"], "the next ones still serve"
            for number in (0, 1):
                Run.all[f"{role}-{number}"].may_end.set()
            await found.turn()
            assert found.events[2:4] == [f"ends {role}-0", f"ends {role}-1"]
            del found.events[:4]
        assert await found.ended() == EXIT_OK
        assert [(line["role"], line["partition"]) for line in found.lines("stopped")] == [
            (role, number) for role in DRAIN_ORDER for number in (0, 1)
        ]


async def test_roles_that_have_not_started_do_not_keep_the_others_waiting() -> None:
    async with node("gateway-0", "router-0", "xiu-0") as found:
        await found.started("gateway-0")
        found.host.end()
        await found.turn()
        assert found.events[3:] == ["ends router-0", "ends xiu-0", "drains gateway-0"]
        assert await found.ended() == EXIT_OK


async def test_a_crash_of_one_ends_all_with_its_exit_code_and_it_leaves_first() -> None:
    async with node("gateway-0", "broker-0", "broker-1", "xiu-0") as found:
        await found.started()
        Run.all["broker-1"].crash(Unavailable("a bug in a task"))
        await found.turn()
        assert found.events[4:] == ["drains broker-1", "ends broker-1", "drains gateway-0"]
        assert await found.ended() == EXIT_CRASH
        assert [event for event in found.events[7:] if event.startswith("drains")] == ["drains broker-0", "drains xiu-0"]
        [line] = found.lines("crashed")
        assert (line["role"], line["partition"], line["error"]) == ("broker", 1, "a bug in a task")
        assert {line["role"] for line in found.lines("stopped")} == {"gateway", "broker", "xiu"}


async def test_a_failed_start_of_one_ends_all_with_its_exit_code() -> None:
    async with node("gateway-0", "proxy-0", "xiu-0") as found:
        await found.started("xiu-0")
        Run.all["proxy-0"].error = ConfigurationError("port 7 is taken")
        Run.all["proxy-0"].start()
        await found.turn()
        assert found.events[3:] == ["ends proxy-0", "ends gateway-0", "drains xiu-0"]
        Run.all["xiu-0"].error = ValueError("another one, later")
        assert await found.ended() == EXIT_ENVIRONMENT, "the first error counts"
        [failed], [crashed] = found.lines("start_failed"), found.lines("crashed")
        assert (failed["role"], failed["error"], crashed["role"]) == ("proxy", "port 7 is taken", "xiu")


async def test_a_role_that_cannot_be_made_ends_all_as_one_that_cannot_start() -> None:
    async with node("gateway-0", "xiu-0", audit_dir="/sys") as found:
        assert await found.ended() == EXIT_ENVIRONMENT
        assert [(line["role"], line["error"]) for line in found.lines("start_failed")] == [("xiu", "audit_dir is not writable")]
        assert [line["role"] for line in found.lines("stopped")] == ["gateway"]


async def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    async with node("gateway-0", "xiu-0") as found:
        await found.started()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
            await found.turn()
        assert codes == [128 + signal.SIGTERM]
        assert [(line["role"], line["signal"]) for line in found.lines("stopped_at_once")] == [("node", "SIGTERM")]
        assert await found.ended() == EXIT_OK


async def test_a_stall_is_reported_once_and_ends_the_session_of_every_role() -> None:
    async with node("gateway-0", "broker-0", "xiu-0") as found:
        await found.started()
        await asyncio.to_thread(found.host._stalled, 7.0, "the stack")
        [line] = found.lines("loop_stalled")
        assert (line["role"], line["seconds"], line["stack"]) == ("node", 7.0, "the stack")
        [session] = {run.session for run in Run.all.values()}
        assert (session.roles, len(session.ended)) == (["gateway", "broker", "xiu"], 1)
        found.host.end()
        await found.ended()


async def test_the_lines_of_a_process_with_one_role_are_that_roles() -> None:
    async with node("xiu-3") as found:
        await found.started()
        await asyncio.to_thread(found.host._stalled, 7.0, "the stack")
        assert [(line["role"], line["partition"]) for line in found.lines("loop_stalled")] == [("xiu", 3)]
        found.host.end()
        assert await found.ended() == EXIT_OK


async def test_an_error_of_the_loop_counts_for_the_role_whose_callback_it_was() -> None:
    async with node("gateway-0", "xiu-0") as found:
        await found.started()

        def callback() -> None:
            raise ValueError("a bug")

        loop = asyncio.get_running_loop()
        for role in found.host._runs:
            if role.name == "xiu":
                loop.call_soon(callback, context=role.context.copy())
        await found.turn()
        assert [len(run.loop_errors) for run in Run.all.values()] == [0, 1]
        loop.call_exception_handler({"message": "whose it is nobody knows"})
        assert [len(run.loop_errors) for run in Run.all.values()] == [1, 1]
        assert [line["role"] for line in found.lines("loop_error")] == ["xiu", "gateway"]
        found.host.end()
        await found.ended()
