"""Records every copy of a mail that comes to an inbox of the SDK, before the SDK looks whether it has it: what was on the wire."""

from __future__ import annotations

from collections.abc import Hashable

import pixiu
from pixiu.errors import MalformedData
from pixiu.wire.envelope import GAP, REDELIVERED, split
from tests.history.record import History, Login, Mail


def record_wire(inbox: pixiu.Inbox, history: History, process: str, uin: int, device: int) -> None:
    """From now on: each connection of the inbox is a process of its own of the history, PROCESS/1, PROCESS/2 …

    Args:
        inbox: not open yet.
        process: the run of the application.
    """
    intake = inbox._intake
    opened, arrived = intake.opened, intake.arrived
    names: dict[Hashable, str] = {}

    def note_opened(stream: Hashable) -> None:
        names[stream] = f"{process}/{len(names) + 1}"
        history.invoke(names[stream], Login(uin, device))
        opened(stream)

    def note_arrived(stream: Hashable, data: bytes, count: int, now: float) -> bool:
        try:
            deliveries = split(data, count)
        except MalformedData:
            deliveries = []
        for one in deliveries:
            if not one.flags & GAP:
                id_ = int.from_bytes(one.record[16:24], "little")
                again = bool(one.flags & REDELIVERED)
                history.wire(names[stream], Mail(one.uin, device, one.lane, id_, one.seq, one.msg_id, again))
        return arrived(stream, data, count, now)

    setattr(intake, "opened", note_opened)  # noqa: B010
    setattr(intake, "arrived", note_arrived)  # noqa: B010
