"""One replay of mail from the file to the verdict.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pixiu.client.client import connect
from pixiu.client.stores.view import InboxView
from pixiu.discovery.target import names_registry
from pixiu.errors import InvalidArgument, NotServed, Unavailable
from pixiu.ids import UIN, device_of_name
from tools.load.payload import monotonic_us
from tools.replay.inbox import load_mentions
from tools.replay.mail.driver import DEVICE, MailDriver
from tools.replay.mail.ledger import MailVerdict, judge_mail
from tools.replay.mail.plan import MailPlan, MailSchedule, make_mail_plan
from tools.replay.watch import ClusterWatch

ASKED_AT_ONCE: Final = 16
"""Limit of users about whom Pi is asked at a time, at the end."""
SAVED_S: Final = 15.0
"""Time limit, at the end, for Pi to have the last acknowledgements, seconds."""
DEVICE_ID: Final = device_of_name(DEVICE)
"""DeviceID of the replay's devices in Pi."""


@dataclass(slots=True)
class MailResult:
    """Result of a replay of mail."""

    verdict: MailVerdict
    plan: MailPlan
    seconds: float
    logins: int
    most_online: int
    interrupted: bool


def load_mail_plan(path: Path, schedule: MailSchedule, *, limit: int = 0) -> MailPlan:
    """Read mentions and make their schedule. Raises `InvalidArgument` with the file, line and field at fault."""
    mentions = load_mentions(path)
    return make_mail_plan(mentions[:limit] if limit else mentions, schedule)


async def replay_mail(
    target: str,
    plan: MailPlan,
    *,
    settle_s: float,
    on_progress: Callable[[MailDriver, ClusterWatch], None] = lambda _driver, _watch: None,
) -> MailResult:
    """Play a plan against the cluster at `zk://HOST:PORT/ROOT`.

    Raises `PixiuError` when the cluster cannot be reached, or lacks a role that mail needs.
    """
    if not names_registry(target):
        raise InvalidArgument(f"--target {target}: a replay needs the registry, zk://HOST:PORT/ROOT, to see the cluster")
    watch = ClusterWatch(target, monotonic_us)
    await watch.start()
    try:
        for role in ("gateway", "proxy", "relay"):
            if not watch.view.running(role):
                raise Unavailable(f"no {role} is Running in the cluster at {target}; start one with `pixiu up`")
        for role in ("xiu", "pi"):
            if not watch.view.running(role):
                raise NotServed(f"no {role} is Running in the cluster at {target}, so no mail: `pixiu up --xius 1 --pis 1`")
        async with connect(target, client="pixiu-replay") as client:
            driver = MailDriver(
                plan,
                client,
                run=secrets.randbits(64),
                settle_s=settle_s,
                on_progress=lambda: on_progress(driver, watch),
            )
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, driver.interrupt)
            began_us = monotonic_us()
            try:
                await driver.run()
            finally:
                loop.remove_signal_handler(signal.SIGINT)
            seconds = (monotonic_us() - began_us) / 1e6
        unread = await _unread(target, list(plan.stays))
        deaths = tuple(death.name for death in watch.book.deaths)
    finally:
        await watch.close()
    verdict = judge_mail(driver.ledger, unread=unread, failed_logins=driver.failed_logins, deaths=deaths)
    return MailResult(verdict, plan, seconds, driver.logins, driver.most_online, driver.interrupted)


async def _unread(target: str, users: list[UIN]) -> int:
    """Number of mails that Pi counts as unread by the replay's devices, once it has the acknowledgements on their way."""
    loop = asyncio.get_running_loop()
    until = loop.time() + SAVED_S
    async with InboxView(target) as view:
        slots = asyncio.Semaphore(ASKED_AT_ONCE)

        async def of(uin: UIN) -> int:
            async with slots:
                lanes = await view.unread(uin)
            return sum(device.unread for lane in lanes for device in lane.devices if device.device_id == DEVICE_ID)

        while True:
            counts = dict(zip(users, await asyncio.gather(*map(of, users)), strict=True))
            users = [uin for uin, count in counts.items() if count]
            if not users or loop.time() > until:
                return sum(counts.values())
            await asyncio.sleep(0.5)
