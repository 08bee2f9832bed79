"""One client's connection by NSQ's protocol V2: a core without a socket and a clock. Pure.

    bytes ──▶ receive ──▶ [Publish, Subscribe, Finish, …]      published, subscribed, authenticated, secured: how it went
    messages ──▶ deliver ──▶ [Write]                           tick, at next_deadline: heartbeats, messages whose time is over

Answers leave in the order of the commands, as clients expect it that write several before they read: what is not answered yet holds
up the answers after it, and no message and no heartbeat.

Source: https://nsq.io/clients/tcp_protocol_spec.html; docs/nsq.md, "Protocol".
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from cluster.nsq.frames import (
    CLOSE_WAIT,
    ERROR,
    HEARTBEAT,
    ID_BYTES,
    OK,
    RESPONSE,
    Sent,
    frame,
    is_name,
    message_frames,
)
from nsqdoor.protocol.commands import Command, Parser, Refused, messages_of, number_of, printable
from nsqdoor.protocol.events import (
    Authenticate,
    Close,
    Credit,
    Effect,
    Finish,
    Limits,
    Publish,
    Requeue,
    StartDeflate,
    StartTls,
    Subscribe,
    Touch,
    Write,
)
from nsqdoor.protocol.extended import NO_HEADERS, split
from nsqdoor.protocol.identify import Terms, agreed
from nsqdoor.protocol.states import ACTIONS, BEFORE_TLS, State

OK_FRAME: Final = frame(RESPONSE, OK)
MISSED: Final = 2
"""Heartbeats that a client may leave without an answer."""
MAX_MESSAGES: Final = 10_000
"""Messages of an MPUB."""


class Session:
    """Decides for one connection; see the module.

    Args:
        limits: of all sessions.
        now: monotonic seconds.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits, self.state = limits, State.OPENED
        self.terms = Terms(limits.heartbeat_ms, limits.msg_timeout_ms)
        self.ready = 0
        """Credit that the client gave."""
        self.published_count = self.finished_count = self.requeued_count = self.sent_count = 0
        self._parser = Parser(limits.max_message, limits.max_body)
        self._parser.early = limits.auth_required
        self._login_by = now + limits.login_ms / 1000 if limits.auth_required else inf
        self._actions: dict[str, Callable[[Command, float, list[Effect]], None]] = {
            "identify": self._identify, "auth": self._auth, "subscribe": self._subscribe, "publish": self._publish,
            "publish_many": self._publish_many, "ready": self._ready, "finish": self._finish, "requeue": self._requeue,
            "touch": self._touch, "stop": self._stop, "nothing": lambda command, now, out: None,
        }  # fmt: skip
        self._answers: deque[Publish] = deque()
        """Answers in their order; those whose `answer` is None are not known yet."""
        self._unanswered = 0
        """Answers that these are: some stand for several."""
        self._pending_bytes = 0
        self._in_flight: dict[bytes, float] = {}
        """ID → time at which the message goes back."""
        self._withheld: deque[Sent] = deque()
        """Messages beyond the client's credit."""
        self._heard, self._beat_at = now, now + self.terms.heartbeat_ms / 1000
        self._waits_for: str = ""
        """Names an event that has to come before the next command is looked at."""
        self._identified = self._secured = self._authenticated = False
        self._subscription: Publish | None = None

    # --- what comes from the client

    def receive(self, data: bytes, now: float) -> list[Effect]:
        """Take bytes."""
        out: list[Effect] = []
        if self.state is State.ENDED:
            return out
        self._heard = now
        self._parser.feed(data)
        if self._waits_for == "TLS":
            self._refuse(Refused("E_INVALID", "bytes before TLS has begun"), out)
            return out
        self._run(now, out)
        return out

    @property
    def held(self) -> bool:
        """True while nothing more should be read."""
        return bool(self._waits_for) or self.full

    @property
    def begins_tls(self) -> bool:
        """True from the answer to IDENTIFY until TLS has begun."""
        return self._waits_for == "TLS"

    @property
    def full(self) -> bool:
        """True while too much is published and not answered."""
        return self._unanswered >= self.limits.max_publishes or self._pending_bytes >= self.limits.max_publish_bytes

    def _run(self, now: float, out: list[Effect]) -> None:
        while self.state is not State.ENDED and not self.held:
            try:
                command = self._parser.next()
                if command is None:
                    return
                self._execute(command, now, out)
            except Refused as why:
                self._refuse(why, out)

    def _execute(self, command: Command, now: float, out: list[Effect]) -> None:
        name = command.name.decode()
        if self.limits.tls_required and not self._secured and command.name not in BEFORE_TLS:
            raise Refused("E_INVALID", f"cannot {name} in current state (TLS required)")
        action = ACTIONS[self.state].get(command.name)
        if action is None:
            raise Refused("E_INVALID", f"cannot {name} in current state")
        self._actions[action](command, now, out)

    def _refuse(self, why: Refused, out: list[Effect]) -> None:
        self._answer(frame(ERROR, str(why).encode(errors="replace")), out, fatal=why.fatal)

    def _answer(self, data: bytes, out: list[Effect], *, fatal: bool = False) -> None:
        """Answer after what is not answered yet. After a fatal answer nothing is read any more."""
        self._answer_later(Publish("", "", (), answer=data, fatal=fatal))
        if fatal:
            self._waits_for = "the end"
        self._flush(out)

    def _answer_later(self, found: Publish) -> None:
        self._answers.append(found)
        self._unanswered += found.answers

    def _flush(self, out: list[Effect]) -> None:
        ready: list[bytes] = []
        fatal = False
        while self._answers and self._answers[0].answer is not None and not fatal:
            found = self._answers.popleft()
            self._unanswered -= found.answers
            ready.append(found.answer or b"")
            fatal = found.fatal
        if ready:
            out.append(Write(b"".join(ready)))
        if fatal:
            self._end("refused", out)

    def _end(self, why: str, out: list[Effect]) -> None:
        self.state = State.ENDED
        self._answers.clear()
        self._unanswered = 0
        self._in_flight.clear()
        self._withheld.clear()
        out.append(Close(why))

    # --- commands

    def _identify(self, command: Command, now: float, out: list[Effect]) -> None:
        if self._identified or self._answers:
            raise Refused("E_INVALID", "cannot IDENTIFY in current state")
        terms = self.terms = agreed(command.body, self.limits)
        self._identified = True
        self._beat_at = now + terms.heartbeat_ms / 1000 if terms.heartbeat_ms else inf
        self._answer(frame(RESPONSE, terms.answer or OK), out)
        if terms.tls:
            if self._parser.waiting:
                raise Refused("E_INVALID", "bytes before TLS has begun")
            self._waits_for = "TLS"
            out.append(StartTls())
        else:
            self._compress(out)

    def secured(self, now: float) -> list[Effect]:
        """TLS has begun."""
        out: list[Effect] = []
        self._waits_for, self._secured, self._heard = "", True, now
        self._answer(frame(RESPONSE, OK), out)
        self._compress(out)
        self._run(now, out)
        return out

    def _compress(self, out: list[Effect]) -> None:
        if self.terms.deflate:
            if self._parser.waiting:
                raise Refused("E_INVALID", "bytes before compression has begun")
            out.append(StartDeflate(self.terms.deflate))
            self._answer(frame(RESPONSE, OK), out)

    def _auth(self, command: Command, now: float, out: list[Effect]) -> None:
        if command.words:
            raise Refused("E_INVALID", "AUTH invalid number of parameters")
        if self._authenticated:
            raise Refused("E_INVALID", "AUTH already set")
        if not self.limits.auth:
            raise Refused("E_AUTH_DISABLED", "AUTH disabled")
        try:
            secret = command.body.decode()
        except UnicodeDecodeError:
            raise Refused("E_AUTH_FAILED", "AUTH failed") from None
        self._waits_for = "AUTH"
        out.append(Authenticate(secret))

    def authenticated(self, identity: str | None, now: float) -> list[Effect]:
        """A login was checked; None: it is refused."""
        out: list[Effect] = []
        self._waits_for, self._heard = "", now
        if self.state is State.ENDED:
            return out
        if identity is None:
            self._refuse(Refused("E_AUTH_FAILED", "AUTH failed"), out)
            return out
        self._authenticated = True
        self._parser.early, self._login_by = False, inf
        said = {"identity": identity, "identity_url": "", "permission_count": 1}
        self._answer(frame(RESPONSE, json.dumps(said).encode()), out)
        self._run(now, out)
        return out

    def _check_login(self, name: str) -> None:
        if self.limits.auth_required and not self._authenticated:
            raise Refused("E_AUTH_FIRST", f"AUTH required before {name}")

    def _topic(self, command: Command, least: int) -> str:
        name = command.name.decode()
        if len(command.words) < least:
            raise Refused("E_INVALID", f"{name} insufficient number of parameters")
        topic = command.words[0].decode("ascii", "replace")
        if not is_name(topic):
            raise Refused("E_BAD_TOPIC", f'{name} topic name "{printable(command.words[0])}" is not valid')
        self._check_login(name)
        return topic

    def _subscribe(self, command: Command, now: float, out: list[Effect]) -> None:
        if not self.terms.heartbeat_ms:
            raise Refused("E_INVALID", "cannot SUB with heartbeats disabled")
        topic = self._topic(command, 2)
        channel = command.words[1].decode("ascii", "replace")
        if not is_name(channel):
            raise Refused("E_BAD_CHANNEL", f'SUB channel name "{printable(command.words[1])}" is not valid')
        if self.limits.headers_required and not self.terms.extended:
            raise Refused("E_SUB_FAILED", "SUB failed: this listener gives messages with headers alone (extend_support)")
        self.state = State.SUBSCRIBED
        self._subscription = Publish("SUB", topic, ())
        self._answer_later(self._subscription)
        out.append(Subscribe(topic, channel, self.terms.tag, self.terms.filter, self.terms.extended))

    def subscribed(self, why: Refused | None, now: float) -> list[Effect]:
        """The channel was joined, or was not, or was left: then the connection ends."""
        out: list[Effect] = []
        found, self._subscription = self._subscription, None
        if self.state is State.ENDED:
            return out
        if found is not None:
            _resolve(found, why)
            self._flush(out)
            self._run(now, out)
        elif why is not None:
            self._refuse(why, out)
        return out

    def _publish(self, command: Command, now: float, out: list[Effect]) -> None:
        delayed = command.name == b"DPUB"
        topic, delay = self._topic(command, 2 if delayed else 1), 0
        if delayed:
            delay = _number(command, 1, "DPUB could not parse timeout")
            if delay > self.limits.max_delay_ms:
                raise Refused("E_INVALID", f"DPUB timeout {delay} out of range 0-{self.limits.max_delay_ms}")
        headers, body = split(command.body) if command.name == b"PUB_EXT" else (NO_HEADERS, command.body)
        found = Publish(command.name.decode(), topic, [body], delay, (headers,))
        if command.name == b"PUB":
            free = self.limits.max_publishes - self._unanswered - 1
            free_bytes = self.limits.max_publish_bytes - self._pending_bytes - len(body)
            more = self._parser.same(b"PUB %s\n" % command.words[0], free, free_bytes) if len(command.words) == 1 else []
            found.bodies = [body, *more]
            found.answers += len(more)
        self._offer(found, out)

    def _publish_many(self, command: Command, now: float, out: list[Effect]) -> None:
        topic = self._topic(command, 1)
        bodies: Sequence[bytes] = messages_of(command.body, self.limits.max_message, MAX_MESSAGES)
        headers: Sequence[object] = (NO_HEADERS,)
        if command.name == b"MPUB_EXT":
            headers, bodies = zip(*map(split, bodies), strict=True)
        self._offer(Publish(command.name.decode(), topic, bodies, 0, headers), out)  # type: ignore[arg-type]

    def _offer(self, found: Publish, out: list[Effect]) -> None:
        found.size = sum(map(len, found.bodies))
        self._pending_bytes += found.size
        self._answer_later(found)
        out.append(found)

    def published(self, outcomes: Sequence[tuple[Publish, Refused | None]], now: float) -> list[Effect]:
        """Messages are stored, or why they are not."""
        out: list[Effect] = []
        if self.full:
            self._heard = now  # it was not read meanwhile
        for found, why in outcomes:
            self._pending_bytes -= found.size
            self.published_count += len(found.bodies) if why is None else found.stored
            _resolve(found, why)
        if self.state is not State.ENDED:
            self._flush(out)
            self._run(now, out)
        return out

    # --- messages

    def _ready(self, command: Command, now: float, out: list[Effect]) -> None:
        count = _number(command, 0, "RDY could not parse count") if command.words else 1
        if count > self.limits.max_rdy:
            raise Refused("E_INVALID", f"RDY count {count} out of range 0-{self.limits.max_rdy}")
        if count != self.ready:
            self.ready = count
            out.append(Credit(count))
        self._give(now, out)

    def deliver(self, messages: Sequence[Sent], now: float) -> list[Effect]:
        """Give messages to the client, as far as its credit allows; the others wait."""
        out: list[Effect] = []
        if self.state is not State.ENDED:
            self._withheld += messages
            self._give(now, out)
        return out

    def _give(self, now: float, out: list[Effect]) -> None:
        room = min(self.ready - len(self._in_flight), len(self._withheld))
        if room <= 0:
            return
        until = now + self.terms.msg_timeout_ms / 1000
        found = [self._withheld.popleft() for _ in range(room)]
        for each in found:
            self._in_flight.pop(each.id, None)
            self._in_flight[each.id] = until
        self.sent_count += room
        out.append(Write(message_frames(found)))

    @property
    def in_flight(self) -> int:
        """Number of messages that the client has."""
        return len(self._in_flight)

    def _message(self, command: Command, failed: str, least: int = 1) -> bytes:
        name = command.name.decode()
        if len(command.words) < least:
            raise Refused("E_INVALID", f"{name} insufficient number of params")
        found = command.words[0]
        if len(found) != ID_BYTES:
            raise Refused("E_INVALID", "invalid message ID")
        if found not in self._in_flight:
            raise _not_in_flight(failed, name, found)
        return found

    def _finish(self, command: Command, now: float, out: list[Effect]) -> None:
        done, unknown = [self._message(command, "E_FIN_FAILED")], list[bytes]()
        del self._in_flight[done[0]]
        for found in self._parser.finishes():
            if self._in_flight.pop(found, None) is not None:
                done.append(found)
            else:
                unknown.append(found)
        self.finished_count += len(done)
        out.append(Finish(done))
        self._give(now, out)
        for found in unknown:
            self._refuse(_not_in_flight("E_FIN_FAILED", "FIN", found), out)

    def _requeue(self, command: Command, now: float, out: list[Effect]) -> None:
        if len(command.words) < 2:
            raise Refused("E_INVALID", "REQ insufficient number of params")
        delay = _number(command, 1, "REQ could not parse timeout", negative=True)
        found = self._message(command, "E_REQ_FAILED", 2)
        del self._in_flight[found]
        self.requeued_count += 1
        out.append(Requeue(found, min(max(0, delay), self.limits.max_delay_ms)))
        self._give(now, out)

    def _touch(self, command: Command, now: float, out: list[Effect]) -> None:
        found = self._message(command, "E_TOUCH_FAILED")
        del self._in_flight[found]
        self._in_flight[found] = now + self.terms.msg_timeout_ms / 1000  # the last, as its deadline is
        out.append(Touch(found))

    def _stop(self, command: Command, now: float, out: list[Effect]) -> None:
        self.state, self.ready = State.CLOSING, 0
        out.append(Credit(0))
        self._answer(frame(RESPONSE, CLOSE_WAIT), out)

    # --- time

    def next_deadline(self) -> float:
        """Time at which `tick` has something to do, monotonic seconds."""
        if self.state is State.ENDED:
            return inf
        return min(self._beat_at, self._late_at(), self._login_until(), next(iter(self._in_flight.values()), inf))

    def _late_at(self) -> float:
        beat = self.terms.heartbeat_ms / 1000
        # A client whose answers wait is not read, so it cannot be heard.
        return self._heard + MISSED * beat if beat and not self.full else inf

    def _login_until(self) -> float:
        return self._login_by if self._waits_for != "AUTH" else inf

    def tick(self, now: float) -> list[Effect]:
        """Send a heartbeat, take back messages whose time is over, end a client that is silent."""
        out: list[Effect] = []
        if self.state is State.ENDED:
            return out
        if now >= self._late_at():
            self._end("silent", out)
            return out
        if now >= self._login_until():
            self._refuse(Refused("E_AUTH_FIRST", f"AUTH required within {self.limits.login_ms / 1000:g} s"), out)
            return out
        while self._in_flight:
            found, until = next(iter(self._in_flight.items()))
            if until > now:
                break
            del self._in_flight[found]
            out.append(Requeue(found, 0))
        self._give(now, out)
        if now >= self._beat_at:
            self._beat_at = now + self.terms.heartbeat_ms / 1000
            out.append(Write(frame(RESPONSE, HEARTBEAT)))
        return out


def _not_in_flight(code: str, name: str, found: bytes) -> Refused:
    return Refused(code, f"{name} {printable(found)} failed ID not in flight", fatal=False)


def _resolve(found: Publish, why: Refused | None) -> None:
    if why is None:
        found.answer = OK_FRAME * found.answers
    else:  # the connection ends with it, so nothing after it is answered
        found.answer = OK_FRAME * found.stored + frame(ERROR, str(why).encode(errors="replace"))
    found.fatal = why is not None and why.fatal


def _number(command: Command, at: int, text: str, *, negative: bool = False) -> int:
    word = command.words[at]
    found = number_of(word.removeprefix(b"-") if negative else word)
    if found is None:
        raise Refused("E_INVALID", f"{text} {printable(word)}")
    return -found if word.startswith(b"-") else found
