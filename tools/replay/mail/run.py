"""One replay of mail from the file to the verdict.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pixiu.client.client import connect
from pixiu.client.stores.view import InboxView
from pixiu.ids import UIN, device_of_name
from tools.load.verdict import judge
from tools.replay.inbox import load_mentions
from tools.replay.mail.driver import DEVICE, MailDriver
from tools.replay.mail.plan import MailPlan, MailSchedule, make_mail_plan
from tools.replay.run import Result, play, watching
from tools.replay.watch import ClusterWatch

RUN_BYTES: Final = 8
"""Bytes that mark the mail of one replay."""
ASKED_AT_ONCE: Final = 16
"""Limit of users about whom Pi is asked at a time, at the end."""
SAVED_S: Final = 15.0
"""Time limit, at the end, for Pi to have the last acknowledgements, seconds."""
DEVICE_ID: Final = device_of_name(DEVICE)
"""DeviceID of the replay's devices in Pi."""


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
) -> Result:
    """Play a plan against the cluster at `zk://HOST:PORT/ROOT`.

    Raises `PixiuError` when the cluster cannot be reached, or lacks a role that mail needs.
    """
    async with (
        watching(target, ("gateway", "proxy", "relay", "xiu", "pi")) as watch,
        connect(target, client="pixiu-replay") as client,
    ):
        driver = MailDriver(
            plan,
            client,
            run=secrets.token_bytes(RUN_BYTES),
            settle_s=settle_s,
            on_progress=lambda: on_progress(driver, watch),
        )
        started_us, seconds = await play(driver)
        unread = await _unread(target, list(plan.stays))
        deaths = watch.book.deaths
    users, schedule = len(plan.stays), plan.schedule
    verdict = judge(driver.ledger, deaths, mail=True, failed_logins=driver.failed_logins, unread=unread, gaps=driver.gaps)
    return Result(
        title="Replay of mail",
        verdict=verdict,
        started_us=started_us,
        seconds=seconds,
        logins=driver.logins,
        interrupted=driver.interrupted,
        notes={
            "sent": f"by {plan.senders:,} users to {users:,}, {seconds:.1f} s",
            "confirmed": "stored on all replicas in sync",
            "delivered": f"and acknowledged by receivers who are there {schedule.online:.0%} of the time: "
            f"{driver.logins:,} logins, {driver.most_online:,} at one time",
            "unread": "by Pi's count at the end",
            "gaps": "reported to receivers",
            "latency": "to the acknowledgement, with the time users are away",
        },
        played={
            "senders": plan.senders,
            "receivers": users,
            "most_online": driver.most_online,
            "online": schedule.online,
            "seed": schedule.seed,
            "planned": {"mails": len(plan.letters), "stays": sum(map(len, plan.stays.values()))},
        },
    )


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
