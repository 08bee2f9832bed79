"""Random and damaged batches: the parsers of the proxy, the gateway and the library agree, and none raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cluster.core.contract import END_OF_TURN, RecordsReceived
from gateway.core import MALFORMED
from gateway.core import Core as GatewayCore
from pixiu.errors import MalformedData
from pixiu.ids import EndpointID
from pixiu.wire.record import Record, crc_ok, decode, encode, offsets, split
from proxy import events as ev
from proxy.core import Core as ProxyCore
from tests.proxy.driver import forward
from tests.support.corpus import seeds
from tests.support.effort import runs

Test = TypeVar("Test", bound=Callable[..., None])

EXAMPLES = runs("PIXIU_FUZZ_EXAMPLES", local=100, ci=300)
pytestmark = pytest.mark.fuzz

ids = st.integers(0, (1 << 63) - 1)
records = st.builds(
    lambda kind, key, body, number, sender, flags, type_, extension: encode(
        kind, key, body, number, sender=sender, flags=flags, type=type_, extension=extension
    ),
    st.integers(1, 4), ids, st.binary(max_size=200), ids, ids, st.integers(0, 63), st.integers(0, 255), st.binary(max_size=40),
)  # fmt: skip
batches = st.lists(records, min_size=1, max_size=8).map(lambda found: (b"".join(found), len(found)))


@st.composite
def damaged(draw: st.DrawFn) -> tuple[bytes, int]:
    """A valid batch with some bytes changed, cut, or a wrong count; or noise."""
    data, count = draw(st.one_of(batches, st.tuples(st.binary(max_size=300), st.integers(0, 5))))
    changed = bytearray(data)
    for position, value in draw(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4)):
        if changed:
            changed[position % len(changed)] = value
    cut = draw(st.integers(0, len(changed)))
    return bytes(changed[: len(changed) - cut % 7]), draw(st.sampled_from([count, count, count + 1, 0, 70_000]))


def example_each(batches: list[tuple[bytes, int]]) -> Callable[[Test], Test]:
    """Play each of `batches` before those that are drawn."""

    def decorate(test: Test) -> Test:
        for batch in reversed(batches):
            test = example(batch)(test)
        return test

    return decorate


def proxy() -> ProxyCore:
    core = ProxyCore(max_record_bytes=1 << 20)
    core.step(ev.BrokersChanged(1, (ev.Replica(EndpointID(1), 0),)), 0.0)
    return core


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example_each([(seed.data, seed.count) for seed in seeds("record")])
@given(damaged())
def test_every_parser_gives_the_same_verdict_on_a_batch(batch: tuple[bytes, int]) -> None:
    data, count = batch
    found = offsets(data, 0, len(data), count)
    try:
        parts = split(data, count)
    except MalformedData:
        parts = []
        assert found is None
    core, gateway = proxy(), GatewayCore(instance=0, generation=1)
    forward(core, data, count)
    whole = gateway.step(RecordsReceived(EndpointID(1), data, 0, len(data), count), 0.0) != [MALFORMED]
    gateway.step(END_OF_TURN, 0.0)
    assert whole == (found is not None) == (core.counters.batches_malformed == 0)
    for part in parts:
        try:
            assert isinstance(decode(part), Record)
            assert crc_ok(part)
        except MalformedData:
            pass


@settings(max_examples=EXAMPLES, deadline=None)
@given(batches)
def test_an_honest_batch_passes_whole(batch: tuple[bytes, int]) -> None:
    data, count = batch
    assert b"".join(split(data, count)) == data
    core = proxy()
    forward(core, data, count)
    assert core.counters.records_in == count
