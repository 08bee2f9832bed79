"""The driver of mail against inboxes in memory: users come and go, and at the end each comes until nothing waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pixiu.errors import InboxFull, Unavailable
from pixiu.ids import uin_of_name
from tools.load.ledger import Judgement
from tools.load.verdict import Verdict, judge
from tools.replay.inbox import Mention
from tools.replay.mail.driver import MailDriver
from tools.replay.mail.plan import MailSchedule, make_mail_plan

QUICK = MailSchedule(seconds=0.5, online=0.2, cycle_s=0.25)


@dataclass
class Cluster:
    """Keeps mail until it is acknowledged; faults are made on demand."""

    inboxes: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)
    refuse_logins: int = 0
    refuse_mail: Callable[[int], bool] = lambda number: False
    lose: Callable[[int], bool] = lambda number: False
    keep_acknowledged: bool = False
    sent: int = 0
    open_now: int = 0
    most_open: int = 0

    def mail_writer(self) -> Any:
        return Writer(self)

    def inbox(self, *, uin: int, device: str, on_gap: Any) -> Any:
        return Receiver(self, uin)


class Writer:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def __aenter__(self) -> Writer:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def space(self) -> None:
        await asyncio.sleep(0)

    def send(self, uin: int, payload: bytes) -> Any:
        cluster, number = self._cluster, self._cluster.sent
        cluster.sent += 1
        refused = cluster.refuse_mail(number)
        if not refused and not cluster.lose(number):
            cluster.inboxes.setdefault(uin, []).append((number, payload))
        return SimpleNamespace(done=True, error=InboxFull("full") if refused else None)


class Receiver:
    def __init__(self, cluster: Cluster, uin: int) -> None:
        self._cluster, self._uin = cluster, uin
        self._taken: set[int] = set()
        self._open = False

    async def ready(self, *, timeout_s: float) -> None:
        await asyncio.sleep(0)
        if self._cluster.refuse_logins:
            self._cluster.refuse_logins -= 1
            raise Unavailable("no gateway")
        assert self._uin not in self._cluster.there, "a user is there once"
        self._cluster.there.add(self._uin)
        self._open = True
        self._cluster.open_now += 1
        self._cluster.most_open = max(self._cluster.most_open, self._cluster.open_now)

    async def __aexit__(self, *_: object) -> None:
        if self._open:
            self._cluster.there.discard(self._uin)
            self._cluster.open_now -= 1

    def __aiter__(self) -> Receiver:
        return self

    async def __anext__(self) -> Any:
        while True:
            for number, payload in self._cluster.inboxes.get(self._uin, []):
                if number not in self._taken:
                    self._taken.add(number)
                    return SimpleNamespace(
                        payload=payload, redelivered=False, acknowledge=lambda number=number: self._acknowledge(number)
                    )
            await asyncio.sleep(0.01)

    def _acknowledge(self, number: int) -> None:
        if not self._cluster.keep_acknowledged:
            inbox = self._cluster.inboxes[self._uin]
            inbox[:] = [each for each in inbox if each[0] != number]


async def play(cluster: Cluster, schedule: MailSchedule = QUICK) -> MailDriver:
    plan = make_mail_plan([Mention(n, n, "r", "s", f"u{n % 8}") for n in range(60)], schedule)
    driver = MailDriver(plan, cluster, run=b"this", slots=3, login_s=1.0, settle_s=0.2)
    async with asyncio.timeout(60):
        await driver.run()
    return driver


def judged(driver: MailDriver) -> Verdict:
    return judge(driver.ledger, mail=True, failed_logins=driver.failed_logins, gaps=driver.gaps)


@pytest.mark.slow
async def test_every_mail_is_acknowledged_once_by_users_who_are_hardly_there() -> None:
    cluster = Cluster()
    driver = await play(cluster)
    assert judged(driver).broken == []
    assert (driver.ledger.sent, driver.ledger.delivered) == (60, 60)
    assert driver.logins >= 8
    assert (cluster.open_now, driver.online) == (0, 0)
    assert driver.most_online == cluster.most_open


@pytest.mark.slow
async def test_what_is_lost_is_missing_and_the_end_does_not_wait_for_ever() -> None:
    driver = await play(Cluster(lose=lambda number: number == 7))
    assert [(missing.number, missing.uin) for missing in driver.ledger.missing()] == [(7, uin_of_name("u7"))]
    assert judged(driver).exit_code == 1


@pytest.mark.slow
async def test_what_is_refused_is_not_waited_for() -> None:
    driver = await play(Cluster(refuse_mail=lambda number: number % 10 == 0))
    assert (driver.ledger.refusals, driver.ledger.delivered) == ({"INBOX_FULL": 6}, 54)
    assert judged(driver).broken == []


@pytest.mark.slow
async def test_failed_logins_are_counted_and_tried_again() -> None:
    driver = await play(Cluster(refuse_logins=5))
    assert (driver.failed_logins, driver.ledger.delivered) == (5, 60)
    assert judged(driver).broken == ["5 logins were not confirmed"]


@pytest.mark.slow
async def test_acknowledgements_that_do_not_stay_are_found() -> None:
    driver = await play(Cluster(keep_acknowledged=True), MailSchedule(seconds=2.0, online=0.6, cycle_s=0.5))
    assert driver.ledger.outcomes[Judgement.REPEATED] > 0
    assert judged(driver).exit_code == 1


@pytest.mark.slow
async def test_an_interrupted_replay_still_receives_what_was_sent() -> None:
    cluster = Cluster()
    plan = make_mail_plan([Mention(n, n, "r", "s", "u") for n in range(1000)], MailSchedule(seconds=600, cycle_s=300))
    driver = MailDriver(plan, cluster, run=b"this", settle_s=0.2)
    running = asyncio.create_task(driver.run())
    async with asyncio.timeout(60):
        while driver.ledger.sent < 2:
            await asyncio.sleep(0.01)
        driver.interrupt()
        await running
    assert 2 <= driver.ledger.sent < 1000
    assert driver.ledger.delivered == driver.ledger.sent
    assert judged(driver).broken == []


async def test_a_sender_that_fails_ends_the_replay() -> None:
    class Broken(Cluster):
        def mail_writer(self) -> Any:
            raise Unavailable("no proxy")

    with pytest.raises(Unavailable):
        await play(Broken())
