"""Carries out `ops.doubling.doubling`: holds the lock, observes and acts until nothing is left to do.

Source: docs/doubling.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from cluster.wire.v1 import doubling_pb2 as pb
from cluster.wire.v1.doubling_pb2_grpc import DoublingStub
from ops.doubling import doubling as plan
from ops.doubling.doubling import Phase, Seen
from ops.doubling.forecast import Plan
from ops.doubling.progress import Moved, Pace, Step, moved
from ops.doubling.reading import read_plan
from pixiu.discovery import paths
from pixiu.discovery.node import NodeState
from pixiu.discovery.operations import Check, NodeExists, NoNode, RegistryConflict
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, MalformedData, NotLeader, RemoteError, Unavailable
from pixiu.ids import hex_id
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import own, peer_channel
from pixiu.version import __version__
from registry.layout import abort_doubling, begin_doubling, commit_doubling, read_layout
from tools.cli.http import fetch

POLL_S: Final = 0.2
SAY_S: Final = 2.0
"""Interval between two progress reports of a phase."""
SPLIT_POLL_S: Final = 0.05
"""Polling interval while moved keys pause: children open by themselves, and each look costs every leader of the role a
connection."""
CALL_S: Final = 10.0
LEADER_WAIT_S: Final = 5.0
"""Time to wait for a leader of each partition before a doubling begins; then it is refused."""
LOCK_WAIT_S: Final = 20.0
"""Time to wait for the lock: a tool that was killed on another machine holds it until its session ends."""
AUDIT_LINES: Final = 100
"""Entries of the audit in a role's node. Policy: the oldest go."""


class Leaders(Protocol):
    """Access to the leaders of Xiu's or Pi's partitions. Raises `Unavailable` for a partition without a leader that answers."""

    async def status(self, view: View, partition: int, doubling: int) -> pb.DoublingStatus:
        """Return a partition's doubling status."""
        ...

    async def advance(self, view: View, partition: int, request: pb.DoublingAdvanceRequest) -> pb.DoublingStatus:
        """Have a partition advance to a phase."""
        ...

    async def take_back(self, view: View, partition: int, request: pb.DoublingTakeBackRequest) -> pb.DoublingStatus:
        """Make sure that no earlier request splits the partition. Raises `InvalidArgument` when it is split."""
        ...


NO_REPLICA: Final = "no replica is registered"


class GrpcLeaders:
    """Asks the replicas of a partition, the last known leader first; replicas that do not lead refuse."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._leads: dict[int, str] = {}

    async def status(self, view: View, partition: int, doubling: int) -> pb.DoublingStatus:
        """See `Leaders`."""
        return await self._ask(
            view, partition, lambda stub: stub.Status(pb.DoublingStatusRequest(doubling=doubling), timeout=CALL_S)
        )

    async def advance(self, view: View, partition: int, request: pb.DoublingAdvanceRequest) -> pb.DoublingStatus:
        """See `Leaders`."""
        return await self._ask(view, partition, lambda stub: stub.Advance(request, timeout=CALL_S))

    async def take_back(self, view: View, partition: int, request: pb.DoublingTakeBackRequest) -> pb.DoublingStatus:
        """See `Leaders`."""
        return await self._ask(view, partition, lambda stub: stub.TakeBack(request, timeout=CALL_S))

    async def _ask(self, view: View, partition: int, call: Callable[[Any], Awaitable[pb.DoublingStatus]]) -> pb.DoublingStatus:
        there = [node.address for node in view.replicas(self._role, partition, (NodeState.RUNNING, NodeState.INIT))]
        said = NO_REPLICA
        for address in sorted(there, key=lambda one: one != self._leads.get(partition)):
            async with peer_channel(address, self._role, own(), PEER_CHANNEL) as channel:
                try:
                    status = await call(DoublingStub(channel))
                except grpc.aio.AioRpcError as error:
                    if NotLeader.code not in (error.details() or "") or said is NO_REPLICA:
                        said = f"{address}: {error.code().name}: {error.details()}"
                    continue
            self._leads[partition] = address
            return status
        raise Unavailable(f"{self._role} partition {partition}: {said}")


@dataclass(slots=True)
class Result:
    """Outcome of one run of the tool."""

    role: str
    doubling: str
    partitions: int
    """Number of the role's partitions now."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase → its duration in this run."""
    missing: tuple[str, ...] = ()
    """Missing conditions when the time was over."""


Progress = Callable[[Step], None]
"""Called when the phase or the missing conditions change, and every two seconds in between."""


class DoublingTool:
    """One run of `pixiu double`.

    Args:
        zookeeper: an open session of this tool alone: the lock ends with it.
        role: the role whose partitions are doubled.
        operator: the operator's name, for the audit.
        progress: see `Progress`.
        leaders: access to Xiu's and Pi's leaders.
        force: see `plan.Seen.force`.
        acted: called after every step in a phase, also after one that only waits, so that a test can end the tool there.
    """

    def __init__(
        self,
        zookeeper: ZooKeeper,
        root: str,
        role: str,
        *,
        operator: str,
        progress: Progress = lambda _step: None,
        leaders: Leaders | None = None,
        force: bool = False,
        acted: Callable[[Phase], None] = lambda _phase: None,
    ) -> None:
        self._zookeeper = zookeeper
        self._root = root
        self._role = role
        self._operator = operator
        self._progress = progress
        self._leaders = leaders or GrpcLeaders(role)
        self._force = force
        self._acted = acted
        self._changed = asyncio.Event()
        self._discovery = Discovery(zookeeper, root, self._on_view)
        self._said: tuple[Phase, tuple[str, ...]] | None = None
        self._said_at = 0.0
        self._pace = Pace()
        self._marked: Phase | None = None

    async def look(self, to: int) -> tuple[Layout, str | None, list[str]]:
        """Return the layout, the doubling to carry out (None: nothing to do), and the problems to fix before it begins. `to` as
        in `plan.chosen`, whose errors it raises."""
        await self._discovery.start()
        layout = await self._layout()
        there = layout.roles.get(self._role, RoleLayout())
        statuses = await self._statuses(there, 0) if self._role in plan.STORED else {}
        new, strayed = hex_id(secrets.randbits(63) or 1), plan.unnamed(statuses, there)
        doubling = plan.chosen(layout, self._role, to, plan.unfinished(statuses, there), new, strayed)
        if doubling is None or doubling in there.doublings:
            return layout, doubling, []
        mute = await self._mute(there, statuses) if self._role in plan.STORED else []
        return layout, doubling, plan.problems(self._discovery.view, self._role, __version__, mute)

    async def _mute(self, there: RoleLayout, statuses: Mapping[int, pb.DoublingStatus]) -> list[int]:
        """Return the partitions of which no leader answers. Waits a while, because a leader that renews its lease answers again
        in a moment."""
        until = time.monotonic() + LEADER_WAIT_S
        while mute := [partition for partition in range(there.n) if partition not in statuses]:
            if time.monotonic() >= until:
                break
            await asyncio.sleep(POLL_S)
            statuses = await self._statuses(there, 0)
        return mute

    async def forecast(self) -> Plan:
        """Forecast the result of a doubling from the role's present load. Call it after `look`."""
        here = await self._zookeeper.exists(paths.supervisor(self._root)) is not None
        return await read_plan(self._discovery.view, self._role, here=here)

    async def close(self) -> None:
        """Stop watching the registry; the session stays open."""
        await self._discovery.close()

    async def run(self, doubling: str, timeout_s: float) -> Result:
        """Carry a doubling out from its present phase, for at most `timeout_s` seconds. After that `Result.missing` names the
        missing conditions, and another run continues. Raises `Unavailable`, `InvalidArgument`, `RegistryUnavailable`."""
        result = Result(self._role, doubling, 0)
        await self._lock(doubling)
        try:
            there = (await self._layout()).roles[self._role]
            if doubling in there.doublings:  # a late tool that was taking it back finds this line, and does nothing
                await self._audit(doubling, "resumed", there)
            until = time.monotonic() + timeout_s
            since, last = time.monotonic(), None
            while True:
                seen = await self._see(doubling)
                phase, action = plan.decide(seen)
                if last is not None and phase is not last:
                    now = time.monotonic()
                    result.seconds[last.value] = result.seconds.get(last.value, 0.0) + now - since
                    since = now
                last = phase
                result.partitions = seen.layout.n
                missing = action.missing if isinstance(action, plan.Wait) else ()
                self._tell(phase, missing, moved(seen, phase))
                await self._mark(phase, doubling)
                if isinstance(action, plan.Finished):
                    await self._audit(doubling, "finished", seen.layout)
                    return result
                if isinstance(action, plan.Wait):
                    if time.monotonic() >= until:
                        result.missing = missing
                        return result
                    self._acted(phase)
                    await self._pause(phase)
                    continue
                await self._holds_lock()
                refused = await self._act(seen, action)
                if refused:
                    self._tell(phase, refused)
                    if time.monotonic() >= until:
                        result.missing = refused
                        return result
                    await self._pause(phase)
                self._acted(phase)
        finally:
            await self._unlock()

    async def take_back(self, doubling: str) -> Layout:
        """Take back a doubling that has split nothing yet. Returns the new layout. Raises as `plan.check_take_back`."""
        await self._lock(doubling)
        try:
            seen = await self._see(doubling)
            plan.check_take_back(seen)
            if self._role in plan.STORED and len(seen.statuses) < seen.layout.n:
                raise Unavailable(f"not every leader of {self._role} answers, so one may have been split: `pixiu status`")
            line = await self._audit(doubling, "being taken back", seen.layout)
            if self._role in plan.STORED:
                await self._keep_whole(seen)
            try:
                layout = await abort_doubling(self._zookeeper, self._root, self._role, doubling, line)
            except RegistryConflict:
                raise Unavailable("another tool has gone on with this doubling meanwhile: look again") from None
            await self._audit(doubling, "taken back", layout.roles[self._role])
            return layout
        finally:
            await self._unlock()

    async def _keep_whole(self, seen: Seen) -> None:
        """Make sure in every parent's log that a SPLIT which is under way, or in the log, comes too late."""
        request = pb.DoublingTakeBackRequest(
            doubling=int(seen.doubling, 16), partitions=2 * len(seen.parents), operator=self._operator
        )
        view = self._discovery.view
        await self._all(self._leaders.take_back(view, parent, request) for parent in seen.parents)

    @staticmethod
    async def _all(asked: Iterable[Awaitable[pb.DoublingStatus]]) -> None:
        """Wait for all, also after a failure; then raise the first error."""
        for one in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(one, BaseException):
                raise one

    # --- looking

    def _on_view(self, view: View) -> None:
        self._changed.set()

    async def _pause(self, phase: Phase) -> None:
        """Wait until something changes in the registry, or for a polling interval."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SPLIT_POLL_S if phase in (Phase.SPLIT, Phase.OPEN) else POLL_S):
                await self._changed.wait()

    async def _layout(self) -> Layout:
        layout = await read_layout(self._zookeeper, self._root)
        if layout is None:
            raise InvalidArgument(
                f"the registry holds no layout at {self._root}: is the root right, and was a cluster started there?"
            )
        return layout

    async def _see(self, doubling: str) -> Seen:
        layout, view = await self._layout(), self._discovery.view
        there = layout.roles[self._role]
        running = {partition: len(view.replicas(self._role, partition)) for partition in range(max(there.n, there.next))}
        statuses: dict[int, pb.DoublingStatus] = {}
        behind: tuple[str, ...] = ()
        if self._role in plan.STORED:
            statuses = await self._statuses(there, int(doubling, 16))
        if doubling in there.ended:
            behind = await self._behind(layout.version)
        return Seen(self._role, there, doubling, running, statuses, behind, self._force)

    async def _statuses(self, there: RoleLayout, doubling: int) -> dict[int, pb.DoublingStatus]:
        view, count = self._discovery.view, max(there.n, there.next)
        found = await asyncio.gather(
            *(self._leaders.status(view, partition, doubling) for partition in range(count)), return_exceptions=True
        )
        return {partition: one for partition, one in enumerate(found) if isinstance(one, pb.DoublingStatus)}

    async def _behind(self, version: int) -> tuple[str, ...]:
        """Return, in words, the Running processes that report an earlier layout. Silent ones are left to `pixiu status`."""
        nodes = [node for node in self._discovery.view.nodes if node.state is NodeState.RUNNING]

        async def ask(host: str, port: int) -> int:
            try:
                _, body = await fetch(host, port, "/health")
                said = json.loads(body)
                return int(said["layout_version"])
            except (OSError, ValueError, TypeError, KeyError):
                return version

        said = await asyncio.gather(*(ask(node.host, node.http_port) for node in nodes))
        return tuple(
            f"{node.role} at {node.address} uses layout version {known}, not {version}"
            for node, known in zip(nodes, said, strict=True)
            if known < version
        )

    def _tell(self, phase: Phase, missing: tuple[str, ...], done: Moved | None = None) -> None:
        now = time.monotonic()
        step = self._pace.step(phase, missing, done, now)
        if (phase, missing) != self._said or (done is not None and now - self._said_at >= SAY_S):
            self._said, self._said_at = (phase, missing), now
            self._progress(step)

    # --- acting

    async def _act(self, seen: Seen, action: plan.Action) -> tuple[str, ...]:
        """Take a step. Returns, in words, who refused it and why. Others may have advanced: the next look finds those that have
        not, and asks again."""
        if isinstance(action, plan.Begin):
            layout = await begin_doubling(self._zookeeper, self._root, self._role, seen.doubling)
            await self._audit(seen.doubling, "begun", layout.roles[self._role])
        elif isinstance(action, plan.Commit):
            layout = await commit_doubling(self._zookeeper, self._root, self._role, seen.doubling)
            await self._audit(seen.doubling, "committed", layout.roles[self._role])
        elif isinstance(action, plan.Advance):
            return await self._advance(seen, action)
        return ()

    async def _advance(self, seen: Seen, action: plan.Advance) -> tuple[str, ...]:
        if action.forced:
            await self._audit(seen.doubling, f"deleted by force: {action.forced}", seen.layout)
        view, total, number = self._discovery.view, 2 * len(seen.parents), int(seen.doubling, 16)
        requests = {
            partition: pb.DoublingAdvanceRequest(
                doubling=number, partitions=total, phase=action.phase, operator=self._operator, fence=seen.statuses[partition].fence
            )
            for partition in action.partitions
        }
        done = await asyncio.gather(
            *(self._leaders.advance(view, partition, request) for partition, request in requests.items()), return_exceptions=True
        )
        failed = [one for one in done if isinstance(one, BaseException)]
        for one in failed:
            if not isinstance(one, Unavailable):
                raise one
        return tuple(str(one) for one in failed)

    # --- the lock

    async def _lock(self, doubling: str) -> None:
        """Take the role's lock. Raises `InvalidArgument` when another tool is at work, on any role."""
        until = time.monotonic() + LOCK_WAIT_S
        path = paths.doubling(self._root, self._role)
        said = self._holds(doubling, Phase.BEGIN)
        await self._zookeeper.ensure_path(paths.role_directory(self._root, self._role))
        while True:
            for role in paths.DOUBLED_ROLES:
                holder = await self._holder(role)
                if holder is not None and time.monotonic() >= until:
                    raise InvalidArgument(
                        f"{holder.get('operator')} doubles {role} (pid {holder.get('pid')} on {holder.get('host')}); one at a time"
                    )
                if holder is not None:
                    self._tell(Phase.BEGIN, (f"the tool of {holder.get('operator')} on {holder.get('host')} to end ({role})",))
                    break
            else:
                with contextlib.suppress(NodeExists):
                    await self._zookeeper.create(path, json.dumps(said).encode(), ephemeral=True)
                    return
            await asyncio.sleep(POLL_S)

    def _holds(self, doubling: str, phase: Phase) -> dict[str, object]:
        """Content of the lock: its holder and the phase."""
        who: dict[str, object] = {"operator": self._operator, "host": socket.gethostname(), "pid": os.getpid()}
        return who | {"doubling": doubling, "phase": phase.value}

    async def _mark(self, phase: Phase, doubling: str) -> None:
        """Write the phase into the lock, for `pixiu status`; once for each phase. Without ZooKeeper the update is lost."""
        if phase is self._marked:
            return
        self._marked = phase
        with contextlib.suppress(RemoteError):
            await self._zookeeper.set(paths.doubling(self._root, self._role), json.dumps(self._holds(doubling, phase)).encode())

    async def _holder(self, role: str) -> dict[str, object] | None:
        """Return the holder of a role's lock. Removes the lock of a dead tool on this machine, which would last until its
        session ends."""
        path = paths.doubling(self._root, role)
        try:
            data, stat = await self._zookeeper.get(path)
        except NoNode:
            return None
        if stat.ephemeral_owner == self._zookeeper.session_id:
            return None
        try:
            said = json.loads(data)
        except ValueError:
            raise MalformedData(f"{path} was not written by this tool: find out who holds it") from None
        said = said if isinstance(said, dict) else {}
        if said.get("host") == socket.gethostname() and isinstance(said.get("pid"), int) and not _lives(said["pid"]):
            with contextlib.suppress(NoNode):
                await self._zookeeper.delete(path, stat.version)
            return None
        return said

    async def _holds_lock(self) -> None:
        stat = await self._zookeeper.exists(paths.doubling(self._root, self._role))
        if stat is None or stat.ephemeral_owner != self._zookeeper.session_id:
            raise Unavailable("this tool has lost its session with ZooKeeper, and its lock; run it again: it goes on where it was")

    async def _unlock(self) -> None:
        with contextlib.suppress(Exception):  # it goes with the session, which ends now
            stat = await self._zookeeper.exists(paths.doubling(self._root, self._role))
            if stat is not None and stat.ephemeral_owner == self._zookeeper.session_id:
                await self._zookeeper.delete(paths.doubling(self._root, self._role))

    # --- the audit

    async def _audit(self, doubling: str, what: str, layout: RoleLayout) -> Check:
        """Add a line to the audit of a role's layout, kept in the registry, newest last. Returns a check that fails once another
        line was added."""
        path = paths.doublings(self._root, self._role)
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "operator": self._operator, "doubling": doubling,
            "what": what, "n": layout.n, "next": layout.next,
        }  # fmt: skip
        try:
            data, stat = await self._zookeeper.get(path)
            lines = [*data.decode().splitlines()[1 - AUDIT_LINES :], json.dumps(line)]
            return Check(path, (await self._zookeeper.set(path, "\n".join(lines).encode(), stat.version)).version)
        except NoNode:
            await self._zookeeper.create(path, json.dumps(line).encode())
            return Check(path, 0)


def _lives(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
