"""Show and manage a user's inbox: lists, unread counts, devices, dead letters.

Looking changes nothing: no device, no session. Everything is read from Pi and Xiu.

Source: docs/stores.md, docs/operations.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, TypeVar

import typer
from typer.core import TyperGroup

from pixiu.client.stores.pages import LANES, MAX_PAGE, DeadLetterEntry, InboxEntry, Lane
from pixiu.client.stores.view import InboxView, read_inbox
from pixiu.discovery.reachable import check_reachable
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID
from pixiu.wire.record import LANE_FIRST, LANE_NORMAL
from tools.cli.inbox_tables import (
    dead_letter_json,
    dead_letter_table,
    device_json,
    device_table,
    lane_json,
    table,
    unread_json,
)
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, Yes, console, fail, guarded, print_json, print_result, print_text

ALL: Final = "all"
MAX_RANGE: Final = 40
"""Characters of a range of InboxSeqs."""
SUMMARY: Final = (__doc__ or "").split("\n\n")[0]
MOVED: Final = {
    "--unread": "unread {uin}",
    "--acknowledge": "acknowledge {uin} UP_TO --lane L --device NAME",
    "--drop-device": "drop-device {uin} NUMBER",
    "--delete": "delete {uin} FROM-TO --lane L",
    "--dead-letters": "dead {uin}",
    "--resend": "resend {uin} ID|all",
    "--drop": "drop {uin} ID|all",
}
"""Options from before there were subcommands, and their replacements."""
T = TypeVar("T")


class _Inbox(TyperGroup):
    """Reports the right subcommand for a command line from before there were any."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            uin = next((word for word in args if word.isdecimal()), "UIN")
            options = {word.partition("=")[0] for word in args}
            use = next((text for option, text in MOVED.items() if option in options), "list {uin}")
            problem = f"there is no `pixiu inbox {args[0]}`; it takes a subcommand: pixiu inbox {use.format(uin=uin)}"
            fail(InvalidArgument(problem), as_json="--json" in options)
        return super().parse_args(ctx, args)


inbox = typer.Typer(cls=_Inbox, help=SUMMARY, no_args_is_help=True)
Uin = Annotated[int, typer.Argument(help="Whose inbox.", metavar="UIN")]
AnyLane = Annotated[int, typer.Option("--lane", min=-1, max=1, help="Only this lane: 0 first, 1 normal. Default: both.")]
OneLane = Annotated[int, typer.Option("--lane", min=0, max=1, help="Lane of the numbers: 0 first, 1 normal.")]
Count = Annotated[int, typer.Option("--count", "-n", min=1, max=MAX_PAGE, help="Number of entries to list of each lane.")]


@inbox.command("list")
@guarded
def list_entries(
    uin: Uin,
    lane: AnyLane = -1,
    after: Annotated[int, typer.Option("--after", min=0, help="Only entries after this InboxSeq.", metavar="SEQ")] = 0,
    before: Annotated[
        int, typer.Option("--before", min=0, help="Back in time: entries before this InboxSeq, newest first.", metavar="SEQ")
    ] = 0,
    count: Count = 50,
    peek: Annotated[bool, typer.Option("--peek/--no-peek", help="Show the messages too, not only their numbers.")] = True,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """List the inbox's entries, oldest first. Acknowledges nothing."""
    _check(uin)
    pages = _run(target, lambda view: view.page(uin, _lanes(lane), after=after, before=before, count=count, fetch=peek))
    _show(pages, uin, after, before, as_json)


@inbox.command()
@guarded
def unread(uin: Uin, lane: AnyLane = -1, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Count the readable entries of each lane, and those that each device has not acknowledged. Opens no session."""
    _check(uin)
    found = _run(target, lambda view: view.unread(uin, _lanes(lane)))
    if as_json:
        print_json({"uin": uin, "lanes": [unread_json(each) for each in found]})
        return
    for each in found:
        waiting = ", ".join(f"device {device.number}: {device.unread}" for device in each.devices) or "no devices yet"
        text = f"lane {each.lane}: {each.readable} can be read, the newest is number {each.last}; unread: {waiting}"
        print_text(text)


@inbox.command()
@guarded
def devices(uin: Uin, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """List the user's devices: when each was seen, how far it has acknowledged, whether the inbox waits for it."""
    _check(uin)
    found = _run(target, lambda view: view.unread(uin, LANES))
    if as_json:
        print_json({"uin": uin, "lanes": [unread_json(each) for each in found]})
    elif found[0].devices:
        console().print(device_table(found))
    else:
        console().print(f"{uin} has no devices yet", highlight=False)


@inbox.command()
@guarded
def acknowledge(
    uin: Uin,
    up_to: Annotated[int, typer.Argument(min=1, help="Acknowledge everything up to this InboxSeq.", metavar="UP_TO")],
    lane: OneLane,
    device: Annotated[
        str, typer.Option("--device", help="Name of the device that acknowledges; created if it does not exist.", metavar="NAME")
    ],
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Acknowledge as a device of that name. Other devices still get what they have not acknowledged."""
    _check(uin)
    found = _run(target, lambda view: view.acknowledge(uin, lane, up_to, device))
    text = f"device {found.number} ({device}) of {uin} has acknowledged lane {lane} up to {found.up_to}, {found.unread} unread"
    print_result({"uin": uin, "lane": lane, **device_json(found)}, text, as_json=as_json)


@inbox.command("drop-device")
@guarded
def drop_device(
    uin: Uin,
    number: Annotated[
        int, typer.Argument(min=0, help="Number of the device, as `pixiu inbox devices` shows it.", metavar="NUMBER")
    ],
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Remove a device: the inbox no longer waits for it. If it comes back, it counts as a new device."""
    _check(uin)
    _run(target, lambda view: view.drop_device(uin, number))
    print_result({"uin": uin, "dropped_device": number}, f"nothing waits for device {number} of {uin} any longer", as_json=as_json)


@inbox.command()
@guarded
def delete(
    uin: Uin,
    entries: Annotated[str, typer.Argument(help="A range of InboxSeqs such as 3-9, or a single one.", metavar="FROM-TO")],
    lane: OneLane,
    yes: Yes = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Delete entries for all devices, after a confirmation."""
    _check(uin)
    _delete(target, uin, lane, entries, yes, as_json)


@inbox.command()
@guarded
def dead(uin: Uin, count: Count = 50, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """List dead letters: mail that the receiver's handler gave up on, with reason, attempts, sender and time."""
    _check(uin)
    _show_dead(_run(target, lambda view: view.dead_letters(uin, count=count)), uin, as_json)


Letter = Annotated[str, typer.Argument(help="A dead letter's id, as `pixiu inbox dead` shows it, or all.", metavar="ID|all")]


@inbox.command()
@guarded
def resend(uin: Uin, letter: Letter, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Send the mail of dead letters again, at least once, and delete the letters. Exit code 1: some cannot be read and were
    kept."""
    _check(uin)
    done, left = _handle_dead(target, uin, letter.lower(), drop=False)
    rest = f"; {left} cannot be read and were kept" if left else ""
    print_result(
        {"uin": uin, "sent": done, "unreadable": left}, f"sent again: {done} mail{'' if done == 1 else 's'}{rest}", as_json=as_json
    )
    if left:
        raise typer.Exit(1)


@inbox.command()
@guarded
def drop(uin: Uin, letter: Letter, yes: Yes = False, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Delete dead letters, after a confirmation."""
    _check(uin)
    wanted = letter.lower()
    if not yes:
        what = "all dead letters" if wanted == ALL else f"dead letter {wanted}"
        typer.confirm(f"Delete {what} of {uin}?", abort=True, err=True)
    done, _ = _handle_dead(target, uin, wanted, drop=True)
    print_result({"uin": uin, "deleted": done}, f"deleted: {done} dead letter{'' if done == 1 else 's'} of {uin}", as_json=as_json)


def _check(uin: int) -> None:
    if not 0 < uin <= MAX_ID:
        raise InvalidArgument(f"a UIN is from 1 to 2^63-1, not {uin}")


def _lanes(lane: int) -> tuple[int, ...]:
    return tuple(LANES) if lane < 0 else (lane,)


def _run(target: str, work: Callable[[InboxView], Awaitable[T]]) -> T:
    async def run() -> T:
        opened = InboxView(target)
        check_reachable(target)
        async with opened as view:
            return await work(view)

    return asyncio.run(run())


def _show(lanes: Sequence[Lane], uin: int, after: int, before: int, as_json: bool) -> None:
    """Show pages."""
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
        out.print(f"the inbox of {uin} has no entries here", highlight=False)


def _delete(target: str, uin: int, lane: int, wanted: str, yes: bool, as_json: bool) -> None:
    first, _, last = wanted.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal()) or len(wanted) > MAX_RANGE:
        raise InvalidArgument(f"give a range of InboxSeqs such as 3-9, or a single one, not {wanted[:MAX_RANGE]!r}")
    begin, end = int(first), int(last or first)
    if not 0 < begin <= end <= MAX_ID:
        raise InvalidArgument(f"a range of InboxSeqs starts at 1 or above, not {wanted}")
    if not yes:
        typer.confirm(f"Delete {begin}-{end} of lane {lane} of {uin}, for all devices?", abort=True, err=True)
    count = _run(target, lambda view: view.delete(uin, lane, begin, end))
    print_result({"uin": uin, "lane": lane, "deleted": count}, f"deleted: {count} of lane {lane} of {uin}", as_json=as_json)


def _show_dead(letters: Sequence[DeadLetterEntry], uin: int, as_json: bool) -> None:
    if as_json:
        print_json({"uin": uin, "dead_letters": [dead_letter_json(dead) for dead in letters]})
    elif letters:
        console().print(dead_letter_table(letters))
    else:
        console().print(f"{uin} has no dead letters", highlight=False)


async def _pages(view: InboxView, uin: int, wanted: str, *, drop: bool) -> AsyncIterator[list[DeadLetterEntry]]:
    """Iterate over the selected dead letters, a page at a time; unless they are to be dropped, include those of other devices for
    the same mail. Raises `InvalidArgument` when there is none."""
    found, first, normal = False, 0, 0
    while page := await view.dead_letters(uin, after=(first, normal), count=MAX_PAGE):
        meant = [dead for dead in page if wanted in (ALL, f"{dead.entry.msg_id:016x}")]
        if wanted != ALL and not drop:
            mails = {dead.letter.msg_id for dead in meant if dead.letter is not None}
            meant += [dead for dead in page if dead.letter is not None and dead.letter.msg_id in mails and dead not in meant]
        found |= bool(meant)
        yield meant
        first = max([first, *(dead.entry.seq for dead in page if dead.entry.lane == LANE_FIRST)])
        normal = max([normal, *(dead.entry.seq for dead in page if dead.entry.lane == LANE_NORMAL)])
    if not found and wanted != ALL:
        raise InvalidArgument(f"{uin} has no dead letter {wanted}; `pixiu inbox dead {uin}` lists them")


def _handle_dead(target: str, uin: int, wanted: str, *, drop: bool) -> tuple[int, int]:
    """Drop dead letters, or send their mail again. Returns how many were handled and how many are left."""

    return _run(target, lambda view: handle_dead(view, uin, wanted, drop=drop))


async def handle_dead(view: InboxView, uin: int, wanted: str, *, drop: bool) -> tuple[int, int]:
    """Drop dead letters, one by its ID or `ALL`, or send their mail again. Returns how many were handled and how many are left."""
    done = left = 0
    async for letters in _pages(view, uin, wanted, drop=drop):
        if drop:
            done += await view.drop(uin, letters)
        else:
            done += len(await view.resend(uin, letters))
            left += sum(dead.original is None for dead in letters)
    return done, left


__all__ = ["InboxEntry", "Lane", "inbox", "lane_json", "read_inbox", "table"]
