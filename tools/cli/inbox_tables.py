"""Inboxes for people and for programs: tables, and JSON values.

Source: docs/operations.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from rich.markup import escape
from rich.table import Table

from pixiu.client.messages.message import Message
from pixiu.client.stores.pages import DeadLetterEntry, DeviceState, InboxEntry, Lane
from tools.cli.output import visible

SHOWN_CHARACTERS: Final = 60


def table(entries: Sequence[InboxEntry], now_ms: int) -> Table:
    """Make tables of the result, for people."""
    shown = _table("lane", "seq", "msg id", "sent", "sender", "bytes", "message")
    for entry in entries:
        message = entry.message
        if message is None:
            shown.add_row(str(entry.lane), str(entry.seq), f"{entry.msg_id:016x}", "", "", "", f"[dim]{entry.code}[/]")
            continue
        note = "[yellow]expired[/] " if entry.expired(now_ms) else ""
        shown.add_row(
            str(entry.lane), str(entry.seq), f"{entry.msg_id:016x}", _time(message.sent_at_ms), str(message.sender or "service"),
            str(len(message.payload)), note + escape(_text(message.payload)),
        )  # fmt: skip
    return shown


def device_table(lanes: Sequence[Lane]) -> Table:
    """Table of a user's devices and their numbers of unacknowledged entries."""
    shown = _table("device", "name", "seen", *(f"lane {lane.lane}: unread" for lane in lanes), "acknowledged up to")
    for states in zip(*(lane.devices for lane in lanes), strict=True):
        device: DeviceState = states[0]
        note = "" if device.counts else " [yellow](not waited for)[/]"
        shown.add_row(
            str(device.number), escape(_name(device)), _time(device.seen_s * 1000) + note,
            *(str(state.unread) for state in states), ", ".join(str(state.up_to) for state in states),
        )  # fmt: skip
    return shown


def dead_letter_table(letters: Sequence[DeadLetterEntry]) -> Table:
    """Table of dead letters; the first column is the argument of `resend` and `drop`."""
    shown = _table("id", "device", "lane", "seq", "given up", "attempts", "sender", "sent", "reason", "message")
    for dead in letters:
        letter, original, name = dead.letter, dead.original, f"{dead.entry.msg_id:016x}"
        if letter is None:
            shown.add_row(name, "", "", "", "", "", "", "", f"[dim]{dead.entry.code}[/]", "")
            continue
        sender, sent = (str(original.sender or "service"), _time(original.sent_at_ms)) if original else ("", "")
        body = escape(_text(original.payload)) if original else f"[dim]{dead.entry.code}[/]"
        shown.add_row(
            name, escape(_text(letter.device.encode())), str(letter.lane), str(letter.seq), _time(letter.failed_at_ms),
            str(letter.attempts), sender, sent,
            escape(_text(letter.reason.encode())), body,
        )  # fmt: skip
    return shown


def lane_json(found: Lane) -> dict[str, object]:
    """A lane as JSON values; a payload that is not UTF-8 is in hex."""
    entries: list[dict[str, object]] = []
    now_ms = time.time_ns() // 1_000_000
    for entry in found.entries:
        shown: dict[str, object] = {"seq": entry.seq, "msg_id": f"{entry.msg_id:016x}"}
        if entry.code:
            shown["code"] = entry.code
        if (message := entry.message) is not None:
            shown |= _message_json(message) | {"expired": entry.expired(now_ms)}
        entries.append(shown)
    return {
        "lane": found.lane, "floor": found.floor, "last": found.last, "gap": found.gap, "dropped": found.dropped,
        "entries": entries,
    }  # fmt: skip


def unread_json(found: Lane) -> dict[str, object]:
    """A lane's devices as JSON values."""
    devices = [device_json(device) for device in found.devices]
    return {"lane": found.lane, "last": found.last, "readable": found.readable, "devices": devices}


def device_json(device: DeviceState) -> dict[str, object]:
    """A device as JSON values."""
    return {
        "device": device.number, "name": device.name, "device_id": f"{device.device_id:012x}", "seen_s": device.seen_s,
        "counts": device.counts, "up_to": device.up_to, "unread": device.unread,
    }  # fmt: skip


def dead_letter_json(dead: DeadLetterEntry) -> dict[str, object]:
    """A dead letter as JSON values."""
    shown: dict[str, object] = {"id": f"{dead.entry.msg_id:016x}"}
    if dead.entry.code:
        shown["code"] = dead.entry.code
    if (letter := dead.letter) is not None:
        shown |= {
            "device": letter.device, "lane": letter.lane, "seq": letter.seq, "msg_id": f"{letter.msg_id:016x}",
            "attempts": letter.attempts, "failed_at_ms": letter.failed_at_ms, "reason": letter.reason,
        }  # fmt: skip
    if dead.original is not None:
        shown["original"] = _message_json(dead.original)
    return shown


def _name(device: DeviceState) -> str:
    """Name of a device, or its DeviceID in hex if it has none."""
    return _text(device.name.encode()) or f"{device.device_id:012x}"


def _message_json(message: Message) -> dict[str, object]:
    shown: dict[str, object] = {
        "sender": message.sender, "sent_at_ms": message.sent_at_ms, "message_id": f"{message.message_id:016x}",
    }  # fmt: skip
    try:
        shown["text"] = message.payload.decode()
    except UnicodeDecodeError:
        shown["hex"] = message.payload.hex()
    return shown


def _table(*names: str) -> Table:
    shown = Table(box=None, pad_edge=False)
    for name in names:
        numbers = name in ("lane", "seq", "bytes", "device", "attempts") or name.endswith("unread")
        shown.add_column(name, justify="right" if numbers else "left")
    return shown


def _time(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000)) if 0 < at_ms < 1 << 47 else ""


def _text(payload: bytes) -> str:
    """The beginning of a payload, with control characters escaped."""
    return visible(payload[: 4 * SHOWN_CHARACTERS].decode(errors="backslashreplace"))[:SHOWN_CHARACTERS]
