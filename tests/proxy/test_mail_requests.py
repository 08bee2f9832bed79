"""Requests to a store are bounded in records, which it decides in one turn of its event loop; refusals have names."""

from __future__ import annotations

import pixiu
from cluster.listeners.request_limits import SLICE
from pixiu.errors import all_errors
from pixiu.wire.levels import Level
from proxy import mail_events as ev
from proxy.mail.batches import Batch, Part, Writer
from proxy.mail.requests import MAX_REQUESTS, Link, append_requests, store_requests
from proxy.mail.results import PERMANENT

SMALL = 64
"""Bytes of a record: 4,096 of them are no more than a request has in bytes."""


def batch(count: int) -> Batch:
    found = Batch(Writer(1, 1, 1, 1), Level.REPLICATED, 0, (0,), 10.0, list(range(count)), list(range(count)))
    found.msg_ids = list(range(count))
    found.hold(bytes(SMALL * count))
    return found


def test_small_mail_leaves_for_xiu_in_requests_that_one_turn_decides() -> None:
    link: Link[Batch] = Link(ev.Store(False, 0))
    link.queue.extend(batch(SLICE // 4) for _ in range(40))
    sent = list(store_requests(link, 0.0))
    assert [request.count for request in sent] == [SLICE] * MAX_REQUESTS
    link.queue.clear()
    link.in_flight.clear()
    link.queue.extend(batch(SLICE) for _ in range(2))
    assert [request.count for request in store_requests(link, 0.0)] == [SLICE] * 2


def test_appends_leave_for_pi_in_requests_that_one_turn_applies() -> None:
    link: Link[Part] = Link(ev.Store(True, 0))
    link.epoch = 1
    each = SLICE // 4
    link.queue.extend(Part(batch(each), range(each), range(each)) for _ in range(40))
    sent = list(append_requests(link, 0.0))
    assert len(sent) == MAX_REQUESTS
    assert [request.count for request in link.in_flight.values()] == [SLICE] * MAX_REQUESTS


def test_programs_can_name_every_refusal_of_mail() -> None:
    refusals = {error.__name__ for error in all_errors() if error.code in PERMANENT}
    assert not refusals - set(pixiu.__all__)
