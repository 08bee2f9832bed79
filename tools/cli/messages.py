"""`pixiu send`, `pixiu listen` and `pixiu presence`.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.markup import escape

import pixiu  # its names load the SDK on first use: not for `--help` or wrong use
from pixiu.discovery.reachable import check_reachable
from pixiu.errors import InvalidArgument
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, error_console, guarded, print_json, visible

if TYPE_CHECKING:
    from pixiu.client.destination import Destination
    from pixiu.client.mail.options import LevelName
    from pixiu.client.messages.load_test import LoadTest
    from pixiu.client.messages.send_options import SendOptions

Rooms = Annotated[list[int] | None, typer.Option("--room", "-r", help="A RoomID; may be repeated.", metavar="ROOM")]
Topics = Annotated[list[str] | None, typer.Option("--topic", help="A topic; may be repeated.", metavar="TOPIC")]
Uin = Annotated[int, typer.Option("--uin", help="Your UIN; 0: a service.", metavar="UIN")]


@guarded
def send(
    text: Annotated[str, typer.Argument(help="Text to send; `-` sends each line of the standard input.")],
    room: Annotated[int | None, typer.Option("--room", "-r", help="The RoomID to send to.", metavar="ROOM")] = None,
    topic: Annotated[str | None, typer.Option("--topic", help="The topic to send to.", metavar="TOPIC")] = None,
    user: Annotated[int | None, typer.Option("--user", help="The user to send to.", metavar="UIN")] = None,
    signal: Annotated[
        bool, typer.Option("--signal", help="Send as a signal, to a room or user: three copies are sent, one is delivered.")
    ] = False,
    receipt: Annotated[bool, typer.Option("--receipt", help="With --signal: wait until a gateway has delivered it.")] = False,
    mail: Annotated[bool, typer.Option("--mail", help="With --user: store it in the user's inbox.")] = False,
    level: Annotated[
        str, typer.Option("--level", help="With --mail: the level, one of replicated, persisted and accepted.")
    ] = "replicated",
    to: Annotated[
        list[int] | None, typer.Option("--to", help="With --mail: a further receiver; may be repeated.", metavar="UIN")
    ] = None,
    load_test: Annotated[bool, typer.Option("--load-test", help="Mark it as part of a load test.")] = False,
    uin: Uin = 0,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Send a message to a room, a topic or a user and wait until the cluster has accepted it; mail until it is stored."""
    if sum(where is not None for where in (room, topic, user)) != 1:
        raise InvalidArgument("give one of --room ROOM or --topic TOPIC or --user UIN")
    if signal and topic is not None:
        raise InvalidArgument("--signal needs --room ROOM or --user UIN: topics take no signals")
    if receipt and not signal:
        raise InvalidArgument("--receipt needs --signal: only signals have receipts of their delivery")

    if mail and (user is None or signal):
        raise InvalidArgument("--mail needs --user UIN, and no --signal")
    if not mail and (to or level != "replicated"):
        raise InvalidArgument("--level and --to need --mail")
    safety = "replicated"
    if mail:
        from pixiu.client.mail.options import level_of

        safety = level_of(level).name.lower()

    async def send_one(client: pixiu.Client, payload: bytes) -> int:
        marked: SendOptions = {"load_test": load_test}
        if mail:
            return (
                await client.user(user or 0).mail(payload, level=cast("LevelName", safety), to=to or (), load_test=load_test)
            ).id
        if signal:
            place = client.room(room) if room is not None else client.user(user or 0)
            return (await place.signal(payload, receipt, **marked)).id
        return (await _destination(client, room, topic, user).send(payload, **marked)).id

    async def run() -> list[int]:
        check_reachable(target)
        async with pixiu.connect(target, uin=uin, client="pixiu-send") as client:
            if text != "-":
                return [await send_one(client, text.encode())]
            sent: list[int] = []
            # A line is one message. A thread reads the lines, so that the client's heartbeats go on.
            while line := await asyncio.to_thread(sys.stdin.buffer.readline):
                sent.append(await send_one(client, line.rstrip(b"\r\n")))
            return sent

    ids = asyncio.run(run())
    outcome = "delivered" if receipt else safety if mail else "accepted"
    what = "mail" if mail else "signal" if signal else "message"
    if as_json:
        print_json({outcome: len(ids), "message_ids": [f"{found:016x}" for found in ids[-100:]]})
    else:
        console().print(f"{outcome}: {len(ids)} {what}{'' if len(ids) == 1 else 's'}", highlight=False)


def _destination(client: pixiu.Client, room: int | None, topic: str | None, user: int | None) -> Destination:
    if user is not None:
        return client.user(user).destination
    return client.room(room) if room is not None else client.topic(topic or "")


@guarded
def listen(
    room: Rooms = None,
    topic: Topics = None,
    user: Annotated[int, typer.Option("--user", help="Listen as this user to what is sent to them.", metavar="UIN")] = 0,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="End after this number of messages; 0: never.")] = 0,
    seconds: Annotated[float, typer.Option("--for", min=0, help="End after this number of seconds; 0: never.")] = 0.0,
    load_test: Annotated[
        str, typer.Option("--load-test", help="Messages of load tests: block, pass (they come, too) or only.", metavar="WHICH")
    ] = "block",
    uin: Uin = 0,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Print the messages of rooms, topics and a user until Ctrl-C."""
    if not room and not topic and not user:
        raise InvalidArgument("give at least one --room ROOM or --topic TOPIC or --user UIN")
    if user and uin not in (0, user):
        raise InvalidArgument(f"--user {user} listens as that user; leave out --uin {uin}")
    uin = uin or user
    from pixiu.client.messages.load_test import check_load_test

    chosen = cast("LoadTest", check_load_test(load_test))

    async def run() -> None:
        check_reachable(target)
        async with pixiu.connect(target, uin=uin, client="" if not uin else f"pixiu-listen-{uin}") as client:
            await _listen(client, room or [], topic or [], count, as_json, chat=bool(user), load_test=chosen)

    async def run_for() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds or None):
                await run()

    try:
        asyncio.run(run_for())
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


async def _listen(
    client: pixiu.Client, rooms: list[int], topics: list[str], count: int, as_json: bool, *, chat: bool, load_test: LoadTest
) -> None:
    out, seen = console(), 0
    subscription = client.subscribe(
        rooms=rooms, topics=topics, chat=chat, on_gap=lambda reason: error_console().print(f"gap: {reason}"), load_test=load_test
    )
    async with subscription:
        if not as_json:
            error_console().print("listening; Ctrl-C ends", style="dim", highlight=False)
        async for message in subscription:
            if as_json:
                print_json(message_json(message))
            else:
                out.print(message_line(message), highlight=False)
            seen += 1
            if count and seen >= count:
                return


@guarded
def presence(
    uins: Annotated[list[int], typer.Argument(help="UINs of the users to look up.", metavar="UIN…")],
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Show which of these users are online, and on how many devices."""

    async def run() -> list[pixiu.UserPresence]:
        check_reachable(target)
        async with pixiu.connect(target, client="pixiu-presence") as client:
            return await client.presence(uins)

    found = asyncio.run(run())
    if as_json:
        print_json({"users": [{"uin": user.uin, "online": user.online, "devices": user.devices} for user in found]})
        return
    for user in found:
        devices = f"online, {user.devices} device{'' if user.devices == 1 else 's'}" if user.online else "offline"
        console().print(f"{user.uin}: {devices}", highlight=False)


def message_json(message: pixiu.Message) -> dict[str, object]:
    """A message as JSON values; a payload that is not UTF-8 is in hex."""
    try:
        body: dict[str, object] = {"text": message.payload.decode()}
    except UnicodeDecodeError:
        body = {"hex": message.payload.hex()}
    where: dict[str, object] = {"room": message.room} if message.topic is None else {"topic": message.topic}
    if message.user:
        where = {"user": message.user}
    if message.signal:
        where["signal"] = True
    return {**where, "sender": message.sender, "message_id": f"{message.message_id:016x}", "sent_at_ms": message.sent_at_ms, **body}


def message_line(message: pixiu.Message) -> str:
    """A message as one line; control characters are escaped, so that no message can move the cursor."""
    text = message.payload.decode(errors="backslashreplace")
    where = f"room {message.room}" if message.topic is None else message.topic
    if message.user:
        where = f"user {message.user}"
    return f"[dim]{escape(visible(where))}[/] {message.sender or 'service'}: {escape(visible(text))}"
