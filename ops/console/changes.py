"""Calls that buttons make: the audited ones of the commands.

Source: docs/console.md, "Requests".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from cluster.access.kicks import Kick
from ops.access.access_commands import post_kick
from ops.bridges.commands import bridges_of, pause_bridges
from ops.console.cluster import Cluster
from ops.console.inputs import Inputs
from pixiu.discovery.topics import MAX_NUMBER
from pixiu.errors import InvalidArgument
from tools.cli.inbox import handle_dead
from tools.topics.channels import resend_dead, seek_channel, seek_of

Change = Callable[[Cluster, Inputs, str], Awaitable[Mapping[str, Any]]]
"""Makes a change of a cluster, from a request's body, for a user."""


async def kick(cluster: Cluster, inputs: Inputs, _user: str) -> Mapping[str, Any]:
    """End the sessions of a client ID or of a user, as `pixiu kick --client ID` or `pixiu kick UIN`."""
    user = inputs.number("user", 0)
    kick_ = Kick(str(user) if user else "", "", "", False, inputs.text("client", ""), inputs.flag("forget"), "")
    kick_.check()
    await post_kick(cluster.target, kick_.text())
    if kick_.forget:  # of whoever was back before the session was removed, as the command does
        await post_kick(cluster.target, replace(kick_, forget=False).text())
    return {"client": kick_.client, "user": user}


async def topic_resend(cluster: Cluster, inputs: Inputs, _user: str) -> Mapping[str, Any]:
    """Deliver dead letters of a channel again, all or some of one part, as `pixiu topic resend`."""
    part, name, channel = inputs.number("part", 0, 0, MAX_NUMBER), inputs.text("name"), inputs.text("channel")
    async with cluster.topics.use() as opened:
        changed = await resend_dead(opened, name, channel, inputs.numbers("offsets"), [part] if part else None)
    return {"topic": name, "channel": channel, "resent": changed}


async def topic_seek(cluster: Cluster, inputs: Inputs, _user: str) -> Mapping[str, Any]:
    """Move a channel, as `pixiu topic seek`."""
    part, name, channel = inputs.number("part", 0, 0, MAX_NUMBER), inputs.text("name"), inputs.text("channel")
    parts = [part] if part else None
    wanted = seek_of(inputs.text("to"), parts, force=inputs.flag("force"))
    async with cluster.topics.use() as opened:
        changed, there = await seek_channel(opened, name, channel, wanted, parts)
    went = [{"part": each.part, "offset": each.floor, "end": each.end} for each in there]
    return {"topic": name, "channel": channel, "changed": changed, "parts": went}


async def inbox_resend(cluster: Cluster, inputs: Inputs, _user: str) -> Mapping[str, Any]:
    """Send the mail of dead letters again, as `pixiu inbox resend`."""
    uin, letter = inputs.number("uin", least=1), inputs.text("letter", most=16)
    async with cluster.inboxes.use() as view:
        done, left = await handle_dead(view, uin, letter.lower(), drop=False)
    return {"uin": uin, "sent": done, "unreadable": left}


async def inbox_drop(cluster: Cluster, inputs: Inputs, _user: str) -> Mapping[str, Any]:
    """Delete dead letters, as `pixiu inbox drop`."""
    uin, letter = inputs.number("uin", least=1), inputs.text("letter", most=16)
    async with cluster.inboxes.use() as view:
        done, _ = await handle_dead(view, uin, letter.lower(), drop=True)
    return {"uin": uin, "deleted": done}


async def inbox_drop_device(cluster: Cluster, inputs: Inputs, _user: str) -> Mapping[str, Any]:
    """Remove a device, as `pixiu inbox drop-device`."""
    uin, number = inputs.number("uin", least=1), inputs.number("device", most=255)
    async with cluster.inboxes.use() as view:
        await view.drop_device(uin, number)
    return {"uin": uin, "dropped_device": number}


async def bridge_pause(cluster: Cluster, inputs: Inputs, user: str) -> Mapping[str, Any]:
    """Pause a bridge, as `pixiu bridge pause`."""
    name = inputs.text("name")
    if name not in (await bridges_of(cluster.target)).found:
        raise InvalidArgument(f"no running process has a bridge {name}")
    return {"paused": await pause_bridges(cluster.target, add=[name], by=user)}


async def bridge_resume(cluster: Cluster, inputs: Inputs, user: str) -> Mapping[str, Any]:
    """Let a paused bridge go on, as `pixiu bridge resume`."""
    return {"paused": await pause_bridges(cluster.target, remove=[inputs.text("name")], by=user)}


CHANGES: Final[Mapping[str, tuple[Change, tuple[str, ...]]]] = {
    "clients/kick": (kick, ("user", "client", "forget")),
    "topic/resend": (topic_resend, ("name", "channel", "part", "offsets")),
    "topic/seek": (topic_seek, ("name", "channel", "part", "to", "force")),
    "inbox/resend": (inbox_resend, ("uin", "letter")),
    "inbox/drop": (inbox_drop, ("uin", "letter")),
    "inbox/drop-device": (inbox_drop_device, ("uin", "device")),
    "bridges/pause": (bridge_pause, ("name",)),
    "bridges/resume": (bridge_resume, ("name",)),
}
"""Path below /api/ → what it does, and the fields of its body."""
