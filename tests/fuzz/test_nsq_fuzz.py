"""Random and damaged streams of NSQ's clients: only effects come out, the same whatever the cuts, and memory stays bounded."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.nsq.frames import MAGIC, Sent, message_id, position_of
from nsqdoor.protocol.commands import BODY_COMMANDS, LINE_COMMANDS, MAX_LINE, Refused
from nsqdoor.protocol.events import Authenticate, Effect, Finish, Limits, Publish, StartTls, Subscribe, Write
from nsqdoor.protocol.extended import Headers, extension_of, headers_of, split
from nsqdoor.protocol.session import Session
from nsqdoor.protocol.states import State
from tests.support.effort import runs

pytestmark = pytest.mark.fuzz
fuzz = settings(
    max_examples=runs("PIXIU_FUZZ_EXAMPLES", local=100, ci=150), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
LIMITS = Limits(max_message=200, max_body=600, max_publishes=4, max_publish_bytes=300, tls=True, auth=True)
names = st.sampled_from(sorted(BODY_COMMANDS | LINE_COMMANDS))
words = st.one_of(st.sampled_from([b"orders", b"billing", b"3", b"-1", b"a$", b"", message_id(1, 0)]), st.binary(max_size=20))
said = st.fixed_dictionaries(
    {},
    optional={
        "feature_negotiation": st.booleans(), "tls_v1": st.booleans(), "deflate": st.booleans(), "extend_support": st.booleans(),
        "heartbeat_interval": st.integers(-2, 70_000), "msg_timeout": st.one_of(st.integers(), st.text()), "desired_tag": st.text(),
        "ext_filter": st.dictionaries(st.sampled_from(["type", "filter_ext_key", "filter_data"]), st.integers() | st.text()),
    },
)  # fmt: skip
bodies = st.one_of(st.binary(max_size=250), said.map(lambda found: json.dumps(found).encode()))


@st.composite
def commands(draw: st.DrawFn) -> bytes:
    name = draw(names)
    line = b" ".join([name, *draw(st.lists(words, max_size=3))]) + b"\n"
    if name not in BODY_COMMANDS:
        return line
    body = draw(bodies)
    size = draw(st.one_of(st.just(len(body)), st.integers(-1, 700)))
    return line + size.to_bytes(4, "big", signed=True) + body


streams = st.one_of(st.binary(max_size=400), st.lists(commands(), max_size=12).map(b"".join)).map(MAGIC.__add__)


def play(stream: bytes, cuts: list[int]) -> tuple[list[Effect], Session]:
    """Everything a session wants. What it asks for succeeds at once."""
    session, found, at = Session(LIMITS, 0.0), [], 0
    for end in [*sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]:
        found += answered(session, session.receive(stream[at:end], 1.0))
        at = end
        assert session._parser.waiting <= max(LIMITS.max_body + MAX_LINE + 4, len(stream))
    return found, session


def answered(session: Session, effects: list[Effect]) -> list[Effect]:
    done: list[Effect] = []
    for effect in effects:
        done.append(effect)
        if isinstance(effect, Publish):
            done += answered(session, session.published([(effect, None)], 1.0))
        elif isinstance(effect, Subscribe):
            done += answered(session, session.subscribed(None, 1.0))
            done += answered(session, session.deliver([Sent(message_id(1, 0), 1, 1, b"x")], 1.0))
        elif isinstance(effect, Authenticate):
            done += answered(session, session.authenticated("", 1.0))
        elif isinstance(effect, StartTls):
            done += answered(session, session.secured(1.0))
    return done


def without_cuts(effects: list[Effect]) -> tuple[bytes, list[object]]:
    """What was written, end to end, and everything else: commands that came together, one by one."""
    rest = list[object]()
    for each in effects:
        if isinstance(each, Publish):
            same = [*each.headers] * (len(each.bodies) if len(each.headers) == 1 else 1)
            rest += [(each.command, each.topic, each.delay_ms, *both) for both in zip(each.bodies, same, strict=True)]
        elif isinstance(each, Finish):
            rest += each.ids
        elif not isinstance(each, Write):
            rest.append(each)
    return b"".join(each.data for each in effects if isinstance(each, Write)), rest


@fuzz
@given(streams, st.lists(st.integers(0, 2000), max_size=6))
def test_any_stream_leads_to_effects_alone(stream: bytes, cuts: list[int]) -> None:
    effects, session = play(stream, cuts)
    if session.state is State.ENDED:
        assert session.receive(b"PUB orders\n", 2.0) == []
    for seconds in (40.0, 80.0, 200.0):
        session.tick(seconds)
    if not any(isinstance(each, StartTls) for each in effects):  # bytes before TLS are refused, and cuts say which these are
        assert without_cuts(effects) == without_cuts(play(stream, [])[0])


@fuzz
@given(st.binary(max_size=300))
def test_any_headers_are_read_or_refused(found: bytes) -> None:
    for read in (headers_of, split):
        with contextlib.suppress(Refused):
            read(found)


@fuzz
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda name: name not in ("zan_test", "##client_dispatch_tag")), st.text()
    ),
    st.sampled_from(["", "blue"]),
    st.booleans(),
)
def test_headers_come_back_as_they_were(values: dict[str, str], tag: str, load_test: bool) -> None:
    try:
        wanted = Headers({name: value.encode() for name, value in values.items()}, tag, load_test)
        "".join(values).encode()
    except UnicodeEncodeError:
        return
    found = extension_of(wanted)
    assert (headers_of(found) if found else Headers({})) == wanted


@fuzz
@given(st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 48) - 1))
def test_an_id_stands_for_one_position(part: int, offset: int) -> None:
    found = message_id(part, offset)
    assert len(found) == 16
    assert position_of(found) == (part, offset)
