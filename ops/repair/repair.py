"""`pixiu repair`: check what every replica stores, repair it from its peers, and compare the replicas.

Source: docs/replication.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import grpc
import grpc.aio
import typer
from rich.markup import escape
from rich.table import Table

from cluster.wire.v1 import repair_pb2, replication_pb2
from cluster.wire.v1.repair_pb2_grpc import RepairStub
from cluster.wire.v1.replication_pb2_grpc import ReplicationStub
from ops.polling import polled
from pixiu.discovery.node import Node
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import own, peer_channel
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, operator, print_json, print_text
from tools.cli.replicas import LEADING, ReplicaStatus
from tools.cli.status import ProcessStatus, read_status

CHECK_S: Final = 3600.0
"""Time limit for one replica to read everything that it stores, seconds."""
ROLES: Final = ("xiu", "pi", "topic")
DROPS: Final = ("pi", "topic")
"""Roles of which an operator can give up what no replica has."""
BACK_S: Final = 120.0
"""Time limit for a replica to start again and take its state from another one, seconds."""
BACK_POLL_S: Final = 1.0
NOT_BACK: Final = f"it stopped to restart and is not back after {BACK_S:.0f} s: start it"
ANSWER_S: Final = 10.0
"""Time limit for a registered replica to report its state, seconds."""
ANSWER_POLL_S: Final = 0.5


@dataclass(slots=True)
class Checked:
    """Result for one replica: the damage in its own store, and its differences from others."""

    role: str
    partition: int
    replica: int
    member: str
    checked: int = 0
    """Records of a Xiu, values of a Pi or segments of topics that were read and are intact."""
    damaged: int = 0
    """Places that could not be read."""
    repaired: int = 0
    """Rows, or gaps of topics, taken from another replica; for a Pi 1: its state as a whole."""
    left: int = 0
    """Places that still cannot be read."""
    differing: int = 0
    """Ranges, of Partition_Msg_IDs or users, in which its state differs from its leader's."""
    differed: int = 0
    """Differing ranges before a repair."""
    text: str = ""

    @property
    def well(self) -> bool:
        """True if nothing is left to do."""
        return not (self.left or self.differing or self.text)

    def json(self) -> dict[str, object]:
        """The result as JSON values."""
        return asdict(self)


@guarded
def repair(
    role: Annotated[str, typer.Option("--role", help="Role of the replicas: xiu, pi or topic. Default: all.")] = "",
    partition: Annotated[int, typer.Option("--partition", help="Partition to check. Default: all.")] = -1,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
    drop: Annotated[
        bool, typer.Option("--drop", help="Give up what is damaged on every replica of a partition of Pi or a group of topics.")
    ] = False,
    reason: Annotated[
        str, typer.Option("--reason", help="With --drop and --set-clock: the reason, for the leader's audit log.")
    ] = "",
    set_clock: Annotated[
        bool, typer.Option("--set-clock", help="Do nothing else than set back a partition's time that a wrong clock moved ahead.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --drop: do not ask for confirmation.")] = False,
) -> None:
    """Check everything that every replica stores, repair damage from its peers, and compare the replicas.
    Exit code 0: all is well now, 1: something could not be repaired or differs, 2: there are no replicas."""
    if role and role not in ROLES:
        raise InvalidArgument(f"--role {role}: only {' and '.join(ROLES)} can be checked")
    if drop and (role not in DROPS or partition < 0 or not reason):
        raise InvalidArgument(
            "--drop gives up what is lost in one partition of Pi or group of topics: add --role pi or topic, --partition P and "
            "--reason TEXT"
        )
    if set_clock:
        if not role or partition < 0 or not reason:
            raise InvalidArgument("--set-clock is for one partition: add --role, --partition P and --reason TEXT")
        print_text(asyncio.run(set_back(role, partition, reason, target)))
        return
    found = asyncio.run(_repair(role, partition, target))
    if drop and any(each.left for each in found):
        if not as_json:
            console().print(table(found))
        if not yes:
            typer.confirm("Give up, for good, every value that cannot be read?", abort=True)
        lost = asyncio.run(give_up(role, partition, reason, target))
        if not as_json:
            print_text(lost)
        found = asyncio.run(_repair(role, partition, target))
    if as_json:
        print_json({"replicas": [each.json() for each in found]}, indent=2)
    else:
        console().print(table(found))
    if not all(each.well for each in found):
        raise typer.Exit(1)


def table(found: Iterable[Checked]) -> Table:
    """Make a table of the result, for people."""
    shown = Table(box=None, pad_edge=False)
    names = ("role", "partition", "replica", "member", "checked", "damaged", "repaired", "left", "differed", "differing", "problem")
    for name in names:
        shown.add_column(name, justify="left" if name in ("role", "member", "problem") else "right")
    for each in found:
        numbers = (each.checked, each.damaged, each.repaired, each.left, each.differed, each.differing)
        shown.add_row(
            each.role, str(each.partition), str(each.replica), escape(each.member), *(f"{n:,}" for n in numbers), escape(each.text)
        )
    return shown


async def _repair(role: str, partition: int, target: str) -> list[Checked]:
    processes = await _registered(role, partition, target)
    if not processes:
        raise InvalidArgument("no live replica has this role and partition")
    partitions: dict[tuple[str, int], list[ReplicaStatus]] = {}
    found: list[Checked] = []
    for process in processes:
        node = process.node
        if process.replica is not None:
            partitions.setdefault((node.role, node.partition), []).append(process.replica)
        else:
            text = f"{node.address}: {process.problem or 'does not report its state'}; it was not checked"
            found.append(Checked(node.role, node.partition, node.replica, "", text=text))
    for _, replicas in sorted(partitions.items()):
        found += await _one_partition(sorted(replicas, key=lambda replica: replica.node.replica), target)
        found += absent(replicas)
    return found


def absent(replicas: Sequence[ReplicaStatus]) -> list[Checked]:
    """Members that a partition's leader counts as in sync and that are not registered: they hold data, and were not checked."""
    here = {replica.member for replica in replicas}
    missing = {member for replica in replicas if replica.member == replica.leader for member in replica.in_sync} - here
    text = "counts as in sync with its leader but is not registered: it does not run and was not checked"
    node = replicas[0].node
    return [Checked(node.role, node.partition, -1, member, text=text) for member in sorted(missing)]


async def _registered(role: str, partition: int, target: str) -> list[ProcessStatus]:
    """Find the processes to check once each of them answers; after a time limit, include those that do not."""

    async def look() -> list[ProcessStatus]:
        roles = (role,) if role else ROLES
        found = (await read_status(target)).processes
        return [each for each in found if each.node.role in roles and partition in (-1, each.node.partition)]

    return await polled(look, lambda found: all(each.replica is not None for each in found), ANSWER_S, ANSWER_POLL_S)


async def _one_partition(replicas: list[ReplicaStatus], target: str) -> list[Checked]:
    """Check one replica after the other, because they repair themselves from each other, then compare each with its leader, unless
    that is damaged itself."""
    applied, leaders = max(replica.applied for replica in replicas), {replica.leader for replica in replicas}
    checked = [await _check(replica, target, applied) for replica in replicas]
    compared = replicas[0].node.role != "topic"  # these have CRCs for everything
    if compared and len(checked) > 1 and all(each.well for each in checked if each.member in leaders):
        for each in checked:
            await _compare(each, target)
    return checked


async def _verify(node: Node, *, mend: bool) -> repair_pb2.VerifyReply:
    async with peer_channel(node.address, node.role, own(), PEER_CHANNEL) as channel:
        stub: Any = RepairStub(channel)
        reply: repair_pb2.VerifyReply = await stub.Verify(repair_pb2.VerifyRequest(repair=mend), timeout=CHECK_S)
        return reply


async def _check(replica: ReplicaStatus, target: str, applied: int) -> Checked:
    """Check a replica. A Xiu repairs itself. A damaged Pi sets its state aside, ends, and takes another replica's when its
    supervisor starts it again. `applied`: the partition's position when the check began; the replica is back when it has reached
    it."""
    node = replica.node
    checked = Checked(node.role, node.partition, node.replica, replica.member)
    try:
        reply = await _verify(node, mend=True)
    except grpc.aio.AioRpcError as error:
        checked.text = f"{node.address}: {error.details()}"
        return checked
    checked.checked, checked.damaged, checked.repaired, checked.left = reply.checked, reply.damaged, reply.repaired, reply.left
    checked.text = reply.text
    if reply.restarts:
        values = await _back(replica, target, applied)
        if values is None:
            checked.text += f"; {NOT_BACK}"
        else:
            checked.checked, checked.repaired, checked.left, checked.text = values, 1, 0, ""
    return checked


async def _leader(role: str, partition: int, target: str) -> ReplicaStatus:
    for process in (await read_status(target)).processes:
        found = process.replica
        if found is not None and found.state == LEADING and (found.node.role, found.node.partition) == (role, partition):
            return found
    raise Unavailable(f"{role} partition {partition} has no leader")


async def set_back(role: str, partition: int, reason: str, target: str) -> str:
    """Set a partition's clock; returns the outcome in words."""
    leader = await _leader(role, partition, target)
    request = replication_pb2.OperatorRequest(operator=operator(), reason=reason, member=int(leader.member, 16))
    async with peer_channel(leader.node.address, leader.node.role, own(), PEER_CHANNEL) as channel:
        stub: Any = ReplicationStub(channel)
        try:
            await stub.SetClock(request, timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{leader.node.address}: {error.details()}") from error
    return f"the time of {role} partition {partition} follows its replicas' clocks again"


async def _until_applied(role: str, partition: int, target: str) -> None:
    """Wait until every replica of a partition has applied what is committed now, or until a time limit."""
    wanted = (await _leader(role, partition, target)).committed

    def applied(found: list[ProcessStatus]) -> bool:
        return all(each.replica is not None and each.replica.applied >= wanted for each in found)

    await polled(lambda: _registered(role, partition, target), applied, ANSWER_S, ANSWER_POLL_S)


async def give_up(role: str, partition: int, reason: str, target: str) -> str:
    """Make the leader of a partition give up lost values; returns a description of them."""
    address = (await _leader(role, partition, target)).node.address
    async with peer_channel(address, role, own(), PEER_CHANNEL) as channel:
        stub: Any = RepairStub(channel)
        try:
            reply = await stub.GiveUp(repair_pb2.GiveUpRequest(operator=operator(), reason=reason), timeout=CHECK_S)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{address}: {error.details()}") from error
    await _until_applied(role, partition, target)
    return "\n".join([f"{reply.values} values were given up:", *reply.lost])


async def _now(role: str, member: str, target: str) -> ReplicaStatus | None:
    """Find a replica by its member: after a repair it has another address."""
    for process in (await read_status(target)).processes:
        if process.replica is not None and (process.replica.node.role, process.replica.member) == (role, member):
            return process.replica
    return None


async def _ask_compare(node: Node, *, mend: bool) -> repair_pb2.CompareReply:
    async with peer_channel(node.address, node.role, own(), PEER_CHANNEL) as channel:
        stub: Any = RepairStub(channel)
        reply: repair_pb2.CompareReply = await stub.Compare(repair_pb2.CompareRequest(repair=mend), timeout=CHECK_S)
        return reply


async def _compare(checked: Checked, target: str) -> None:
    """Compare a replica with its leader. A Pi whose state differs takes the leader's, like a damaged one."""
    if not checked.well:
        return  # its problem is reported already
    replica = await polled(
        lambda: _now(checked.role, checked.member, target), lambda replica: replica is not None, ANSWER_S, ANSWER_POLL_S
    )
    if replica is None:
        checked.text = "it no longer answers; it was not compared with its leader"
        return
    node = replica.node
    try:
        reply = await _ask_compare(node, mend=True)
        checked.differed = checked.differing = len(reply.differing)
        checked.text = reply.text
        if not reply.restarts:
            return
        if await _back(replica, target, replica.applied) is None:
            checked.text += f"; {NOT_BACK}"
            return
        back = await _now(checked.role, checked.member, target)
        node = back.node if back is not None else node
        again = await _ask_compare(node, mend=False)
    except grpc.aio.AioRpcError as error:
        checked.text = f"{node.address}: {error.details()}"
        return
    checked.repaired, checked.differing, checked.text = 1, len(again.differing), again.text


async def _back(replica: ReplicaStatus, target: str, applied: int) -> int | None:
    """Wait until the replica runs again, has applied the log up to a position, and is intact. Returns its number of values; None
    after the time limit."""
    end = time.monotonic() + BACK_S
    while time.monotonic() < end:
        await asyncio.sleep(BACK_POLL_S)
        for process in (await read_status(target)).processes:
            now = process.replica
            if now is None or now.member != replica.member or now.node.endpoint == replica.node.endpoint:
                continue
            if now.applied < applied:
                continue
            with contextlib.suppress(grpc.aio.AioRpcError):
                reply = await _verify(now.node, mend=False)
                if not reply.left:
                    return int(reply.checked)
    return None
