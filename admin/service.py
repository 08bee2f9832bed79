"""An admin's shell: the lease of leadership, the registry and the leaders of groups around its core.

    proxies ──Change──▶ leading admin ──Append──▶ leaders of groups
                           │ ▲
                    topics ▼ │ lease
                         registry

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Final

from admin import events as ev
from admin.beside import Beside
from admin.core import Core
from admin.groups import Groups
from admin.options import Options
from admin.requests import change_of
from cluster.core.contract import TICK
from cluster.core.role import RoleShell, totals
from cluster.core.runner import Runner
from cluster.process.context import Context
from cluster.topics.describe import description_of, refusal_of
from cluster.wire.v1 import admin_pb2, admin_pb2_grpc
from pixiu.discovery.topics import TopicNode
from pixiu.discovery.view import View
from pixiu.errors import MalformedData, NotLeader, PixiuError, Refusal, RegistryUnavailable, RemoteError
from pixiu.rpc.backoff import Backoff
from pixiu.wire.v1 import topic_pb2
from registry.topics import AdminLease, TopicStore

FIRST_BACKOFF_S: Final = 0.2
MAX_BACKOFF_S: Final = 5.0
"""Longest pause after a failure of the registry."""
MAX_SHOWN: Final = 20
"""Changes under way, and faults, that /health and Status show."""
MAX_CALLER: Final = 256
ELECTED: Final = "admin_leads"
DEPOSED: Final = "admin_leads_no_more"
CHANGE: Final = "topic_change"
UNREADABLE: Final = "topic_unreadable"


class Service(RoleShell, admin_pb2_grpc.AdminServicer):
    """An admin's shell: runs one `admin.core.Core` while this process leads."""

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context.crash)
        self._context = context
        self._core = Core(context.options.moves_per_hour)
        self._runner: Runner[ev.Event, ev.Effect] = self.run(Runner(self._core, context.now, tick=TICK))
        on = self._runner.effects.on
        on(ev.WriteTopic, lambda effect: self.spawn(self._write(effect, self._lease.epoch)))
        on(ev.Append, lambda effect: self.spawn(self._append(effect)))
        on(ev.AskLoad, lambda effect: self.spawn(self._load(effect.group)))
        on(ev.Answer, self._answer)
        on(ev.Planned, self._answer)
        self._groups = Groups(lambda: context.view, context.tls)
        self._lease = AdminLease(context.zookeeper, context.root, f"{context.endpoint_id:016x}", self._leadership_changed)
        self._store = TopicStore(context.zookeeper, context.root, self._lease)
        self._beside = Beside(context.options, context.cluster, context.log)
        self._clients: dict[int, asyncio.Future[Any]] = {}
        self._leading = asyncio.Lock()
        self._requests = 0
        self._unreadable: dict[str, str] = {}
        self._problem = ""
        """Why it does not know the topics although it leads; empty: it does."""
        admin_pb2_grpc.add_AdminServicer_to_server(self, context.server)
        context.metrics.collect_from(self._samples)
        context.metrics.collect_from(self._beside.samples)
        context.queries["/availability"] = self._beside.availability

    # --- what the runtime calls

    def on_view(self, view: View) -> None:
        """Note the groups and those that can be asked."""
        groups = range(view.layout.partitions("topic")) if "topic" in view.layout.roles else range(0)
        running = {node.partition for node in view.running("topic")}
        self._runner.step(ev.GroupsChanged(groups, [group for group in groups if group in running]))

    async def start(self) -> None:
        """Try to lead."""
        node = self._context.membership.node
        assert node is not None
        self._lease.start(node.address)

    async def drain(self) -> None:
        """Hand over: another admin leads at once."""
        await self._lease.stop()

    async def stop(self) -> None:
        """Stop everything."""
        await self._lease.stop()
        await self._beside.end()
        self.stop_runners()
        await self.cancel_tasks()
        await self._groups.close()

    def health(self) -> dict[str, object]:
        """Report who leads, what is under way, and what an operator has to look at."""
        under_way, strays = self._core.under_way(), self._core.strays()
        faults = [f"topic {name} cannot be read from the registry: {why}" for name, why in self._unreadable.items()]
        if strays:
            first = f"{strays[0] >> 32}/{strays[0] & 0xFFFFFFFF}"
            faults.append(f"groups hold {len(strays)} parts that the registry does not know, such as {first}")
        if self._problem:
            faults.append(self._problem)
        return {
            "leads": bool(self._core.epoch),
            "leader": self._lease.leader,
            "epoch": self._lease.epoch,
            "topics": sum(1 for _ in self._core.nodes()),
            "under_way": under_way[:MAX_SHOWN],
            "degraded": "; ".join(faults[:MAX_SHOWN]) or None,
        }

    # --- leadership

    def _leadership_changed(self, epoch: int) -> None:
        self._runner.step(ev.Deposed())
        self._unreadable, self._problem = {}, ""
        self._context.log.info(ELECTED if epoch else DEPOSED, epoch=epoch)
        self.spawn(self._lead(epoch))
        if epoch:
            self.spawn(self._begin(epoch))

    async def _lead(self, epoch: int) -> None:
        """Have what runs beside a leader run while this admin leads."""
        async with self._leading:
            await (self._beside.begin() if epoch and epoch == self._lease.epoch else self._beside.end())

    async def _begin(self, epoch: int) -> None:
        """Read all topics, until it succeeds or another admin leads."""
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        while self._lease.epoch == epoch:
            try:
                loaded = await self._store.load()
            except RemoteError as error:
                self._problem = f"the topics cannot be read: {error}"
                await asyncio.sleep(backoff.next_s())
                continue
            if self._lease.epoch != epoch:
                return
            self._unreadable, self._problem = loaded.unreadable, ""
            for name, why in list(loaded.unreadable.items())[:MAX_SHOWN]:
                self._context.log.error(UNREADABLE, topic=name, text=why)
            self._runner.step(ev.Elected(epoch, time.time_ns() // 1_000_000, loaded.numbers, loaded.topics))
            return

    # --- effects

    async def _write(self, effect: ev.WriteTopic, epoch: int) -> None:
        try:
            version = await self._store.write(effect.name, effect.expected, effect.node, effect.numbers)
            self._runner.step(ev.Written(effect.token, version if effect.node is not None else -1, effect.node))
            return
        except RemoteError:
            pass  # it may have happened or not
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        while self._lease.epoch == epoch:
            try:
                found = await self._store.read(effect.name)
            except RegistryUnavailable:
                await asyncio.sleep(backoff.next_s())
                continue
            except MalformedData as error:
                self._unreadable[effect.name] = str(error)
                found = None
            self._runner.step(ev.Written(effect.token, *(found if found is not None else (-1, None))))
            return

    async def _append(self, effect: ev.Append) -> None:
        self._runner.step(await self._groups.append(effect))

    async def _load(self, group: int) -> None:
        self._runner.step(await self._groups.load(group))

    def _answer(self, effect: ev.Answer | ev.Planned) -> None:
        client = self._clients.pop(effect.request, None)
        if client is not None and not client.done():
            client.set_result(effect)

    # --- what proxies and operators ask

    async def Change(self, request: admin_pb2.AdminChange, context: Any) -> admin_pb2.AdminAnswer:
        """Change a topic; answered when the change is in effect, refused, or recorded."""
        wanted = request.change
        kind = wanted.WhichOneof("change") or "nothing"
        try:
            if not self._core.epoch:
                text = self._problem or "this admin does not lead" + (f"; {self._lease.leader} does" if self._lease.leader else "")
                raise NotLeader(text)
            change = change_of(wanted)
        except PixiuError as error:
            return admin_pb2.AdminAnswer(refusal=refusal_of(Refusal.of(error), self._lease.leader))
        answer: ev.Answer = await self._ask(lambda number: ev.ChangeRequested(number, wanted.name, change))
        what = {"ok": True} if answer.refusal is None else {"ok": False, "code": answer.refusal.code}
        self._context.audit.write(CHANGE, topic=wanted.name[:128], change=kind, caller=request.caller[:MAX_CALLER], **what)
        if answer.refusal is not None:
            return admin_pb2.AdminAnswer(refusal=refusal_of(answer.refusal, self._lease.leader))
        node: TopicNode | None = answer.node
        return admin_pb2.AdminAnswer(topic=description_of(node) if node is not None else None)

    async def Plan(self, request: topic_pb2.PlanTopicsRequest, context: Any) -> admin_pb2.AdminPlan:
        """Say which moves of parts would even the groups out, or empty one."""
        drain = request.drain if request.HasField("drain") else None
        found: ev.Planned = await self._ask(lambda number: ev.PlanRequested(number, drain))
        if found.refusal is not None:
            return admin_pb2.AdminPlan(refusal=refusal_of(found.refusal, self._lease.leader))
        moves = [
            topic_pb2.PlannedMove(topic=each.topic, part=each.part, source=each.source, target=each.target, load=each.load)
            for each in found.moves
        ]
        groups = [topic_pb2.PlannedGroup(**each._asdict()) for each in found.groups]
        return admin_pb2.AdminPlan(plan=topic_pb2.TopicPlan(moves=moves, groups=groups))

    async def _ask(self, event_of: Callable[[int], ev.Event]) -> Any:
        """Ask the core. Its own limits bound those that wait, in number and in time."""
        self._requests += 1
        number, client = self._requests, asyncio.get_running_loop().create_future()
        self._clients[number] = client
        try:
            self._runner.step(event_of(number))
            return await client
        finally:
            self._clients.pop(number, None)

    async def Status(self, request: admin_pb2.AdminStatusRequest, context: Any) -> admin_pb2.AdminStatus:
        """Report who leads, and what is under way."""
        return admin_pb2.AdminStatus(
            leads=bool(self._core.epoch),
            leader=self._lease.leader,
            epoch=self._lease.epoch,
            changes=self._core.under_way()[:MAX_SHOWN],
        )

    def _samples(self) -> dict[str, object]:
        return {
            **totals(self._core.counters),
            "leads": int(bool(self._core.epoch)),
            "topics": sum(1 for _ in self._core.nodes()),
            "parts": sum(len(node.parts) for node in self._core.nodes()),
            "topics_unsettled": len(self._core.under_way()),
            "topics_unreadable": len(self._unreadable),
            "stray_parts": len(self._core.strays()),
        }
