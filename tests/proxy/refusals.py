"""Causes every refusal of Xiu's and Pi's cores, and follows it through a proxy's mail pipeline and the SDK's sender to its caller.

python -m tests.proxy.refusals      writes docs/refusals.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from cluster.core.contract import TICK
from cluster.replication.core.events import Rejection
from cluster.replication.core.refusals import refusal_of
from cluster.replication.options import ReplicationOptions
from cluster.store.events import Refused
from pi.events import Reply
from pixiu.client.mail.policy import MailTicket, mail_policy
from pixiu.client.options import ClientOptions
from pixiu.client.send.events import Failure, OpenStream, Outcome
from pixiu.client.send.sender import Sender
from pixiu.errors import Refusal
from pixiu.ids import snowflake
from pixiu.wire.inbox_operations import GENERATION_EPOCH_S, Code
from pixiu.wire.levels import Level, Triple
from pixiu.wire.record import Kind, encode
from proxy import mail_events as me
from proxy.mail.results import why_not
from tests.pi.world import Pi
from tests.proxy.test_mail import PI, Pipeline, record
from tests.support.pi import appends, message
from tests.xiu.parts import NOW_MS, mail
from tests.xiu.world import Xiu, results, user
from xiu.events import Answer

PAGE: Final = Path(__file__).resolve().parents[2] / "docs/refusals.md"
HEAD: Final = """# Refusals of the stores

Written by `python -m tests.proxy.refusals`; do not edit. `tests/proxy/test_refusals.py` causes each in the store's core, lets a
proxy's core and the SDK's act on it, and compares.

Replication and the stores refuse a write with a code, a text and, where it is known, a time after which to try again. All three
reach the proxy as they are, on the wire as fields of `StoreResult` and `PiReply`. The proxy reports a permanent refusal to the
sender at once. After any other it tries again, not before the given time, until `proxy.mail_timeout_s` is over; then it ends the
writer's stream with the last refusal, and the SDK sends again through the next stream until its own `mail_timeout_s`. Its
`OUTCOME_UNKNOWN` then names the last refusal.

"""


class Row(NamedTuple):
    """A refusal, and what becomes of it."""

    store: str
    when: str
    why: Refusal
    proxy: str
    caller: str


REPLICATION: Final = {
    reason: Refusal.of(refusal_of(reason, ReplicationOptions(min_in_sync=2), "host:7", "data/replica")) for reason in Rejection
}
Why = tuple[str, Refusal]
DAY_MS: Final = 86_400_000
CLOCK_S: Final = GENERATION_EPOCH_S + 5000.0
"""Clock of the SDK's writer, Unix seconds."""


def of_xiu() -> Iterator[Why]:
    """Refusals of a Xiu's core."""

    def why(xiu: Xiu, *records: bytes, epoch: int = 0) -> Refusal:
        effects = xiu.send(*(records or (user(1),)), epoch=epoch)
        if not isinstance(effects[0], Answer):
            effects = [*xiu.accept(effects), *xiu.commit()]
        (result,) = results(effects)
        return Refusal(result.code, result.text, result.retry_after_ms)

    for reason, refusal in REPLICATION.items():
        xiu = Xiu()
        (result,) = results(xiu.refuse(xiu.send(user(1)), refusal))
        yield f"replication: {reason.value}", Refusal(result.code, result.text, result.retry_after_ms)
    yield "the writer's epoch is old", why(Xiu(), epoch=2)
    xiu = Xiu()
    xiu.core.stuck = True
    yield "the store is damaged", why(xiu)
    xiu = Xiu()
    xiu.core._catches_up = True
    yield "a new leader reads its log", why(xiu)
    xiu = Xiu()
    xiu.space(False)
    yield "the reserve of the disk is used", why(xiu)
    xiu = Xiu()
    xiu.core.settings = replace(xiu.core.settings, await_restore=True)
    yield "the partition waits for a restore", why(xiu)
    xiu = Xiu()
    xiu.table.space = False
    yield "the table is full", why(xiu)
    yield "the user belongs to another partition", why(Xiu(), mail(1, key=6))
    yield "the record is no mail", why(Xiu(), encode(Kind.ROOM, 5, b"x", snowflake(NOW_MS, 5, 1)))
    xiu = Xiu()
    xiu.core.settings = replace(xiu.core.settings, max_record_bytes=100)
    yield "the record is too large", why(xiu, user(1, bytes(100)))
    yield "the record was damaged", why(Xiu(), user(1)[:-1] + b"?")
    yield "the SnowflakeID is old", why(Xiu(), user(1, at_ms=NOW_MS - 2 * DAY_MS))
    yield "the SnowflakeID is in the future", why(Xiu(), user(1, at_ms=NOW_MS + 120_000))
    xiu = Xiu()
    why(xiu, user(1))
    yield "another message has the SnowflakeID", why(xiu, user(1, b"other"))
    xiu = Xiu()
    xiu.accept(xiu.send(user(1)))
    (result,) = results(xiu.commit(copies=0))
    yield "it is on fewer disks than min_in_sync", Refusal(result.code, result.text)
    xiu = Xiu()
    xiu.accept(xiu.send(user(1)))
    (result,) = results(xiu.deposed())
    yield "the leader changed meanwhile", Refusal(result.code, result.text)


def of_pi() -> Iterator[Why]:
    """Refusals of a Pi's core, of a whole request or of one append."""

    def why(replies: list[Reply]) -> Refusal:
        (reply,) = replies
        return Refusal(reply.code, reply.text, reply.retry_after_ms)

    def proposed() -> Pi:
        pi = Pi()
        pi.ask(appends(5, (message(1), 7)))
        pi.turn()
        return pi

    for reason, refusal in REPLICATION.items():
        yield f"replication: {reason.value}", why(proposed().step(Refused(2, refusal)))
    yield "it does not lead", why(Pi(epoch=0).ask(appends(5, (message(1), 7))))
    yield "the request is malformed", why(Pi().ask(raw=b"?"))
    yield "the user belongs to another partition", why(Pi().ask(appends(5, (message(1), 8))))
    pi = proposed()
    pi.step(Refused(2, REPLICATION[Rejection.OVERLOADED]))
    yield "the writer's stream ended with a refusal", why(pi.ask(appends(5, (message(2), 7))))
    pi = proposed()
    pi.accept(100)
    yield "it is on fewer disks than min_in_sync", why(pi.apply(100, [[1]], 0))
    pi = proposed()
    pi.accept(100)
    yield "the leader changed meanwhile", why(pi.lead(0))
    for code in (Code.INBOX_FULL, Code.DISK_FULL, Code.INVALID_ARGUMENT):
        yield f"one append: {code.name.lower().replace('_', ' ')}", why_not(-code)


def followed(pi: bool, when: str, why: Refusal) -> Row:
    """Give a proxy this answer until it has said something to the writer."""
    pipeline, once = Pipeline(), when.startswith("one append")
    pipeline.mail(record(1, 7), position=1)
    again = leaders = 0
    while True:
        if pi:
            pipeline.store_all()
        for store in pipeline.take(me.SendStore):
            again += 1
            pipeline.stored(me.StoredRun(store.position, 1, 0, 0, why))
        for sent in pipeline.take(me.SendAppend):
            again += 1
            if once:
                pipeline.appended(sent, [-next(code for code in Code if why_not(-code) == why)])
            else:
                pipeline.step(me.Appended(0, pipeline.links[PI], sent.request, [], why, Triple(1, 3, 60), 2))
                pipeline.turn()
        leaders += len(pipeline.take(me.Disconnect))
        result, end = pipeline.results(), pipeline.take(me.EndWriter)
        if result or end:
            break
        pipeline.now += 0.5
        pipeline.step(TICK)
    if result:
        return Row("Pi" if pi else "Xiu", when, why, "reports it", told(result[0]))
    (ended,) = end
    proxy = f"ends the stream with `{ended.why.code}`"
    if again > 1:
        proxy = f"{'asks the next leader' if leaders else 'tries again'} for `mail_timeout_s`, then {proxy}"
    if ended.why.retry_after_ms:
        proxy += f", again after {ended.why.retry_after_ms} ms"
    return Row("Pi" if pi else "Xiu", when, why, proxy, told(ended))


def told(said: me.Result | me.EndWriter) -> str:
    """Have the SDK send a mail to proxies that answer this each time; return what its caller gets."""
    policy = mail_policy(ClientOptions(), lambda: 1, lambda: CLOCK_S)
    core, now, identity = Sender(policy, ("a:1", "b:1"), lambda: 0.5), 0.0, snowflake(NOW_MS, 1, 1)
    ticket, streams, earliest = MailTicket(record(1, 7), identity, Level.REPLICATED), 0, 0.0
    effects = core.offer(ticket, now)
    while not ticket.resolved:
        opened = [effect.stream for effect in effects if isinstance(effect, OpenStream)]
        effects = []
        for stream in opened:
            assert now >= earliest, "it came before the time that the proxy gave"
            streams += 1
            assert core.next_batch(stream, now) is not None
            if isinstance(said, me.Result):
                effects += core.reply(stream, now, outcomes=[Outcome(1, 1, Failure(said.code, said.text))])
            else:
                why, earliest = said.why, now + said.why.retry_after_ms / 1000
                effects += core.ended(stream, now, Failure(why.code, why.text, why.retry_after_ms))
        if not effects:
            now = max(now, core.next_deadline())
            effects = core.tick(now)
    assert ticket.failure is not None
    error = ticket.failure.error()
    if streams == 1:
        return f"`{error.code}`"
    assert isinstance(said, me.EndWriter)
    assert said.why.text in str(error)
    assert now >= policy.timeout_s
    return f"sent again; after `mail_timeout_s` `{error.code}`"


def rows() -> Iterator[Row]:
    """Every refusal, followed."""
    for pi, found in ((False, of_xiu()), (True, of_pi())):
        for when, why in found:
            yield followed(pi, when, why)


def page() -> str:
    """Return docs/refusals.md."""
    lines = [
        "| store | when | code | text: what to do | again after | the proxy | the SDK's caller |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        after = f"{row.why.retry_after_ms} ms" if row.why.retry_after_ms else ""
        lines.append(f"| {row.store} | {row.when} | `{row.why.code}` | {row.why.text} | {after} | {row.proxy} | {row.caller} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
