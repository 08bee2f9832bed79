"""`pixiu promote`: an operator ends the wait of a replica that must not lead by itself.

Source: docs/replication.md.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import grpc
import grpc.aio
import typer

from cluster.wire.v1 import replication_pb2 as pb
from cluster.wire.v1.replication_pb2_grpc import ReplicationStub
from ops.polling import polled
from pixiu.discovery.paths import STORES
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import own, peer_channel
from tools.cli.output import DEFAULT_TARGET, Target, Yes, console, guarded, operator, print_text
from tools.cli.replicas import LEADING, ReplicaStatus
from tools.cli.status import read_status

CALL_S: Final = 10.0
WAIT_S: Final = 30.0
"""Time limit for the replica to become leader, seconds."""
POLL_S: Final = 0.5


@guarded
def promote(
    role: Annotated[str, typer.Argument(help="xiu, pi or topic.")],
    partition: Annotated[int, typer.Argument(help="Number of the partition.")],
    member: Annotated[str, typer.Argument(help="Replica to promote: its member, as `pixiu status` shows it.")],
    reason: Annotated[str, typer.Option("--reason", help="Reason, for the replica's audit log.")],
    force: Annotated[bool, typer.Option("--force", help="Required: promotion by hand is always forced.")] = False,
    yes: Yes = False,
    target: Target = DEFAULT_TARGET,
) -> None:
    """Force a replica to lead with the entries that it has, even if others are lost. Acknowledged messages may be lost: the last
    resort."""
    if role not in STORES:
        raise InvalidArgument(f"{role} has no replicas that elect a leader; name one of {', '.join(STORES)}")
    if not force:
        raise InvalidArgument("replicas elect their leaders by themselves; a promotion by hand may lose messages: add --force")
    chosen, others = asyncio.run(_find(role, partition, member, target))
    print_text(_warning(chosen, others))
    if not yes:
        typer.confirm("Promote it?", abort=True)
    epoch = asyncio.run(_promote(chosen, reason, target))
    console().print(f"{member} leads {role} partition {partition} in epoch {epoch}", highlight=False)


async def _replicas(role: str, target: str) -> list[ReplicaStatus]:
    status = await read_status(target)
    found = (process.replica for process in status.processes)
    return [replica for replica in found if replica is not None and replica.node.role == role]


async def _find(role: str, partition: int, member: str, target: str) -> tuple[ReplicaStatus, list[ReplicaStatus]]:
    everywhere = await _replicas(role, target)
    found = [replica for replica in everywhere if replica.node.partition == partition]
    if everywhere and not found:
        partitions = ", ".join(map(str, sorted({replica.node.partition for replica in everywhere})))
        raise InvalidArgument(f"{role} has no live replica in partition {partition}; there are: {partitions}")
    chosen = [replica for replica in found if replica.member == member]
    if not chosen:
        there = ", ".join(replica.member for replica in found) or "none"
        raise InvalidArgument(f"{role} partition {partition} has no live replica {member}; there are: {there}")
    leaders = [replica for replica in found if replica.state == LEADING]
    if leaders:
        raise InvalidArgument(
            f"{leaders[0].member} leads {role} partition {partition}: stop its process with SIGTERM: it hands over without a loss"
        )
    return chosen[0], [replica for replica in found if replica.member != member]


def _warning(chosen: ReplicaStatus, others: list[ReplicaStatus]) -> str:
    lines = [
        f"{chosen.node.role} partition {chosen.node.partition}: {chosen.member} has entries up to {chosen.end}, "
        f"{chosen.committed} of them known to be committed.",
    ]
    if chosen.degraded:
        lines.append(f"It reports: {chosen.degraded}")
    missing = [member for member in chosen.in_sync if member != chosen.member]
    if missing:
        lines.append(f"In sync, and possibly with more entries: {', '.join(missing)}.")
    lines += [f"{other.member} is live and has entries up to {other.end}." for other in others]
    lines.append(
        "Acknowledged entries that this replica does not have will be lost, also on the other replicas once they follow it."
    )
    return "\n".join(lines)


async def _promote(chosen: ReplicaStatus, reason: str, target: str) -> int:
    request = pb.OperatorRequest(operator=operator(), reason=reason, member=int(chosen.member, 16))
    async with peer_channel(chosen.node.address, chosen.node.role, own(), PEER_CHANNEL) as channel:
        stub: Any = ReplicationStub(channel)
        try:
            await stub.Promote(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{chosen.node.address}: {error.details()}") from error

    async def epoch() -> int:
        found = await _replicas(chosen.node.role, target)
        return next((replica.epoch for replica in found if replica.member == chosen.member and replica.state == LEADING), 0)

    if leads_in := await polled(epoch, bool, WAIT_S, POLL_S):
        return leads_in
    raise Unavailable(f"{chosen.member} does not lead after {WAIT_S:.0f} s; look at its log")
