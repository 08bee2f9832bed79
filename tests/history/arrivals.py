"""What devices and their applications got: whose it is, how often, in which order, marked how.

Source: docs/promises.md, docs/delivery.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict

from tests.history.record import APP, OK, WIRE, Login
from tests.history.survey import NEVER, Copy, Place, Survey
from tests.history.violation import Rule

Run = tuple[str, int, int]
"""(process, UIN, device): one run of an application."""


class Logins:
    """When devices connected."""

    def __init__(self, survey: Survey) -> None:
        self._of_runs: dict[Run, list[int]] = defaultdict(list)
        self._of_devices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        """When each began and ended."""
        for doing in survey.doings:
            if isinstance(doing.operation, Login):
                login = doing.operation
                self._of_runs[doing.process, login.uin, login.device].append(doing.begun)
                self._of_devices[login.uin, login.device].append((doing.begun, doing.ended))

    def of_run(self, copy: Copy) -> int:
        """When the connection on which a copy came began; -1 if that was not recorded."""
        return _last_before(self._of_runs[copy.process, *copy.place[:2]], copy.index)

    def done_of_device(self, copy: Copy) -> int:
        """Until when the device connected, by whatever process, before a copy came: what is sent meanwhile may come twice."""
        logins = self._of_devices[copy.place[:2]]
        at = bisect_right(logins, (copy.index, NEVER))
        return min(logins[at - 1][1], copy.index) if at else -1


def _last_before(indexes: list[int], index: int) -> int:
    at = bisect_right(indexes, index)
    return indexes[at - 1] if at else -1


def check_arrivals(survey: Survey) -> None:
    """The rules about copies."""
    logins = Logins(survey)
    for copy in survey.copies:
        copy.sound = _is_theirs(survey, copy)
    whose = [copy for copy in survey.copies if copy.sound]
    _check_applications(survey, [copy for copy in whose if copy.kind == APP])
    _check_the_wire(survey, [copy for copy in whose if copy.kind == WIRE], logins)
    for copy in whose:
        if copy.kind != OK and copy.seq:
            _check_that_it_is_new(survey, copy, logins)


def _is_theirs(survey: Survey, copy: Copy) -> bool:
    """Whether a copy may be where it is; if not, no other rule looks at it."""
    if copy.id < 0:
        return True  # a list names it by its MsgID alone, and nothing else says whose it is
    uin, _, lane = copy.place
    message = survey.messages.get(copy.id)
    if message is None or message.first > copy.index:
        survey.blame(Rule.ALIEN, f"{copy.id:#x} came to {copy.place}, and nobody had sent it", copy.index)
    elif uin not in message.sent.receivers:
        text = f"{copy.id:#x} was sent to {message.sent.receivers} and came to {uin}"
        survey.blame(Rule.ALIEN, text, message.first, copy.index)
    elif message.possible > copy.index:
        survey.blame(Rule.REFUSED, f"{copy.id:#x} was refused, and came to {copy.place}", message.first, copy.index)
    elif lane != message.sent.lane:
        survey.blame(Rule.CONTENT, f"{copy.id:#x} was sent in lane {message.sent.lane}", message.first, copy.index)
    elif copy.mail and copy.mail.crc and message.sent.crc and copy.mail.crc != message.sent.crc:
        survey.blame(Rule.CONTENT, f"{copy.id:#x} is not as it was sent", message.first, copy.index)
    else:
        return True
    return False


def _check_applications(survey: Survey, copies: list[Copy]) -> None:
    got: dict[Run, dict[int, int]] = defaultdict(dict)
    newest: dict[tuple[str, Place], Copy] = {}
    for copy in copies:
        before = got[copy.process, *copy.place[:2]].setdefault(copy.msg_id or -copy.id, copy.index)
        if before != copy.index:
            survey.blame(Rule.ONCE, f"{copy.process} got {copy.id:#x} again", before, copy.index)
            continue
        _check_order(survey, newest, copy, copy.process)


def _check_order(survey: Survey, newest: dict[tuple[str, Place], Copy], copy: Copy, way: str) -> None:
    if not copy.seq:
        return
    last = newest.get((way, copy.place))
    if last and last.seq > copy.seq:
        text = f"{copy.place} got InboxSeq {copy.seq} ({copy.id:#x}) after {last.seq} ({last.id:#x})"
        survey.blame(Rule.ORDER, text, last.index, copy.index)
    else:
        newest[way, copy.place] = copy


def _check_the_wire(survey: Survey, copies: list[Copy], logins: Logins) -> None:
    seen: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    written: set[tuple[str, int, Place, int]] = set()
    """What came on each connection."""
    repeats: Counter[tuple[int, Place]] = Counter()
    newest: dict[tuple[str, Place], Copy] = {}
    for copy in copies:
        assert copy.mail
        connection = logins.of_run(copy)
        way = (copy.process, connection, copy.place, copy.msg_id or -copy.id)
        on_this = way in written
        written.add(way)
        before = seen[copy.place[:2]].setdefault(copy.msg_id or -copy.id, copy.index)
        sent = survey.messages[copy.id].first if copy.id in survey.messages else -1
        if copy.mail.dup:
            quiet = max(logins.done_of_device(copy), _last_before(survey.faults, copy.index)) < sent
            if before == copy.index and quiet and not survey.relay_changes(sent, copy.index):
                text = f"the first copy of {copy.id:#x} is marked as sent again, and nothing happened since it was sent"
                survey.blame(Rule.DUP, text, sent, copy.index)
            repeats[connection, copy.place] += 1
            most = survey.limits.window * (1 + survey.relay_changes(connection, copy.index))
            if repeats[connection, copy.place] == most + 1:
                text = f"the connection of {copy.place} repeats more than {most} messages"
                survey.blame(Rule.WINDOW, text, connection, copy.index)
        elif before != copy.index:
            # Another relay does not know what was sent; the gateway still knows what it wrote to this connection.
            if on_this or not survey.relay_changes(before, copy.index):
                survey.blame(Rule.DUP, f"{copy.id:#x} came to {copy.place} again, unmarked", before, copy.index)
        else:
            _check_order(survey, newest, copy, f"{copy.process} {connection}")


def _check_that_it_is_new(survey: Survey, copy: Copy, logins: Logins) -> None:
    """What was acknowledged before this connection began must not come on it; a device that was given up may have it anew."""
    if len(survey.devices[copy.place[0]][copy.place[1]]) > 1:
        return
    acknowledged = survey.done[copy.place].first(copy.seq)
    connected = logins.of_run(copy)
    if acknowledged != NEVER and acknowledged < (connected if connected >= 0 else copy.index):
        text = f"{copy.place} had acknowledged {copy.id:#x} (InboxSeq {copy.seq})"
        survey.blame(Rule.ACKNOWLEDGED_AGAIN, text, acknowledged, connected, copy.index)
