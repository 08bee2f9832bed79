"""`pixiu inbox`: what lies in a user's inbox, read from Pi and Xiu, and what an operator may do with it.

Looking changes nothing: no device, no session.

Source: docs/stores.md, docs/operations.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Final, TypeVar

import typer

from pixiu.cli.inbox_tables import (
    dead_letter_json,
    dead_letter_table,
    device_json,
    device_table,
    lane_json,
    table,
    unread_json,
)
from pixiu.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json
from pixiu.cli.reachable import check_reachable
from pixiu.client.inbox_pages import LANES, MAX_PAGE, DeadLetterEntry, Entry, Lane
from pixiu.client.inbox_view import InboxView, read_inbox
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID
from pixiu.wire.record import LANE_FIRST, LANE_NORMAL

ALL: Final = "all"
T = TypeVar("T")


@guarded
def inbox(
    uin: Annotated[int, typer.Argument(help="Whose.", metavar="UIN")],
    lane: Annotated[int, typer.Option("--lane", min=-1, max=1, help="Only this lane: 0 first, 1 normal. Default: both.")] = -1,
    after: Annotated[int, typer.Option("--after", min=0, help="Only entries behind this InboxSeq.", metavar="SEQ")] = 0,
    before: Annotated[
        int, typer.Option("--before", min=0, help="Back in time: entries before this InboxSeq, newest first.", metavar="SEQ")
    ] = 0,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=MAX_PAGE, help="Entries of each lane.")] = 50,
    peek: Annotated[bool, typer.Option("--peek/--no-peek", help="Read the messages too, and not only their numbers.")] = True,
    unread: Annotated[bool, typer.Option("--unread", help="The user's devices, and how much each has not acknowledged.")] = False,
    acknowledge: Annotated[
        int, typer.Option("--acknowledge", min=0, help="Acknowledge up to here, with --lane and --device.", metavar="UP_TO")
    ] = 0,
    device: Annotated[
        str, typer.Option("--device", help="As which device to acknowledge: one of its own, made if need be.", metavar="NAME")
    ] = "",
    drop_device: Annotated[int, typer.Option("--drop-device", min=-1, help="Wait for this device no more.", metavar="NUMBER")] = -1,
    delete: Annotated[
        str, typer.Option("--delete", help="Delete these entries for all devices, with --lane.", metavar="FROM-TO")
    ] = "",
    dead_letters: Annotated[bool, typer.Option("--dead-letters", help="Mail that the receiver could not take.")] = False,
    resend: Annotated[
        str, typer.Option("--resend", help="Send this dead letter's mail again, or all; at least once.", metavar="ID|all")
    ] = "",
    drop: Annotated[str, typer.Option("--drop", help="Delete this dead letter, or all.", metavar="ID|all")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before something is deleted.")] = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """List what lies in a user's inbox, oldest first. Nothing is acknowledged by it. With an option that says so: tend it."""
    if not 0 < uin <= MAX_ID:
        raise InvalidArgument(f"a UIN is from 1 to 2^63-1, not {uin}")
    chosen = [unread, acknowledge > 0, drop_device >= 0, bool(delete), dead_letters, bool(resend), bool(drop)]
    if sum(chosen) > 1:
        raise InvalidArgument("one of --unread, --acknowledge, --drop-device, --delete, --dead-letters, --resend, --drop at a time")
    if acknowledge or delete:
        if lane < 0:
            raise InvalidArgument("numbers are of one lane: give --lane 0 or --lane 1 too")
        if acknowledge and not device:
            raise InvalidArgument("--acknowledge needs --device NAME: each device acknowledges for itself")
    lanes = LANES if lane < 0 else (lane,)
    if acknowledge:
        _acknowledge(target, uin, lane, acknowledge, device, as_json)
    elif drop_device >= 0:
        _run(target, lambda view: view.drop_device(uin, drop_device))
        _say(as_json, {"uin": uin, "dropped_device": drop_device}, f"nothing waits for device {drop_device} of {uin} any more")
    elif delete:
        _delete(target, uin, lane, delete, yes, as_json)
    elif dead_letters:
        _show_dead(_run(target, lambda view: view.dead_letters(uin, count=count)), uin, as_json)
    elif resend or drop:
        _resend_or_drop(target, uin, resend, drop, yes, as_json)
    elif unread:
        _show_unread(_run(target, lambda view: view.unread(uin, lanes)), uin, as_json)
    else:
        pages = _run(target, lambda view: view.page(uin, lanes, after=after, before=before, count=count, fetch=peek))
        _show(pages, uin, after, before, as_json)


def _run(target: str, work: Callable[[InboxView], Awaitable[T]]) -> T:
    async def run() -> T:
        opened = InboxView(target)
        check_reachable(target)
        async with opened as view:
            return await work(view)

    return asyncio.run(run())


def _say(as_json: bool, value: dict[str, object], text: str) -> None:
    if as_json:
        print_json(value)
    else:
        console().print(text, highlight=False, markup=False)


def _show(lanes: Sequence[Lane], uin: int, after: int, before: int, as_json: bool) -> None:
    """Pages."""
    if as_json:
        print_json({"uin": uin, "lanes": [lane_json(found) for found in lanes]})
        return
    out = console()
    entries = [entry for found in lanes for entry in found.entries]
    if entries:
        out.print(table(entries, time.time_ns() // 1_000_000))
    for found in lanes:
        shown = found.entries[-1].seq if found.entries else max(after, found.floor)
        if before:
            if found.entries and shown > found.floor + 1:
                out.print(f"lane {found.lane}: further back: --lane {found.lane} --before {shown}", highlight=False)
        elif found.last > shown:
            out.print(f"lane {found.lane}: {found.last - shown} more: --lane {found.lane} --after {shown}", highlight=False)
        if found.dropped:
            text = f"lane {found.lane}: {found.dropped} were dropped unacknowledged, the newest of them number {found.gap}"
            out.print(f"[yellow]{text}[/]", highlight=False)
    if not entries:
        out.print(f"the inbox of {uin} holds nothing here", highlight=False)


def _show_unread(lanes: Sequence[Lane], uin: int, as_json: bool) -> None:
    if as_json:
        print_json({"uin": uin, "lanes": [unread_json(found) for found in lanes]})
        return
    if lanes[0].devices:
        console().print(device_table(lanes))
    else:
        console().print(f"{uin} has no devices yet", highlight=False)
    for found in lanes:
        console().print(f"lane {found.lane}: {found.readable} can be read, the newest is number {found.last}", highlight=False)


def _acknowledge(target: str, uin: int, lane: int, up_to: int, device: str, as_json: bool) -> None:
    found = _run(target, lambda view: view.acknowledge(uin, lane, up_to, device))
    text = f"device {found.number} ({device}) of {uin} has acknowledged lane {lane} up to {found.up_to}, {found.unread} unread"
    _say(as_json, {"uin": uin, "lane": lane, **device_json(found)}, text)


def _delete(target: str, uin: int, lane: int, wanted: str, yes: bool, as_json: bool) -> None:
    first, _, last = wanted.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise InvalidArgument(f"--delete takes a range of InboxSeqs like 3-9, or one, not {wanted!r}")
    begin, end = int(first), int(last or first)
    if not 0 < begin <= end <= MAX_ID:
        raise InvalidArgument(f"--delete takes a range from 1 on, not {wanted}")
    if not yes:
        typer.confirm(f"Delete {begin}-{end} of lane {lane} of {uin}, for all devices?", abort=True, err=True)
    count = _run(target, lambda view: view.delete(uin, lane, begin, end))
    _say(as_json, {"uin": uin, "lane": lane, "deleted": count}, f"deleted: {count} of lane {lane} of {uin}")


def _show_dead(letters: Sequence[DeadLetterEntry], uin: int, as_json: bool) -> None:
    if as_json:
        print_json({"uin": uin, "dead_letters": [dead_letter_json(dead) for dead in letters]})
    elif letters:
        console().print(dead_letter_table(letters))
    else:
        console().print(f"{uin} has no dead letters", highlight=False)


async def _pages(view: InboxView, uin: int, wanted: str) -> AsyncIterator[list[DeadLetterEntry]]:
    """The dead letters that are meant, a page at a time. Raises `InvalidArgument` when there is none."""
    found, first, normal = False, 0, 0
    while page := await view.dead_letters(uin, after=(first, normal), count=MAX_PAGE):
        meant = [dead for dead in page if wanted in (ALL, f"{dead.entry.msg_id:016x}")]
        found |= bool(meant)
        yield meant
        first = max([first, *(dead.entry.seq for dead in page if dead.entry.lane == LANE_FIRST)])
        normal = max([normal, *(dead.entry.seq for dead in page if dead.entry.lane == LANE_NORMAL)])
    if not found and wanted != ALL:
        raise InvalidArgument(f"{uin} has no dead letter {wanted}; --dead-letters lists them")


def _resend_or_drop(target: str, uin: int, resend: str, drop: str, yes: bool, as_json: bool) -> None:
    wanted = (resend or drop).lower()
    if drop and not yes:
        what = "all dead letters" if wanted == ALL else f"dead letter {wanted}"
        typer.confirm(f"Delete {what} of {uin}?", abort=True, err=True)

    async def work(view: InboxView) -> tuple[int, int]:
        done = left = 0
        async for letters in _pages(view, uin, wanted):
            handled = await view.drop(uin, letters) if drop else len(await view.resend(uin, letters))
            done, left = done + handled, left + len(letters) - handled
        return done, left

    done, left = _run(target, work)
    if drop:
        _say(as_json, {"uin": uin, "deleted": done}, f"deleted: {done} dead letter{'' if done == 1 else 's'} of {uin}")
        return
    rest = f"; {left} cannot be read, and stay" if left else ""
    _say(as_json, {"uin": uin, "sent": done, "unreadable": left}, f"sent again: {done} mail{'' if done == 1 else 's'}{rest}")
    if left:
        raise typer.Exit(1)


__all__ = ["Entry", "Lane", "inbox", "lane_json", "read_inbox", "table"]
