"""Pi and Xiu double while mail is sent and received; the tool is killed in its phases and run again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from pathlib import Path

import pytest

import pixiu
from ops.doubling.doubling import Phase
from tests.e2e.test_doubling import PACE_S, together, tool
from tests.support.cluster import running_cluster, wait_for
from tests.support.effort import portion
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(300)]

USERS = range(1, 9)
FIRST_MAILS = 1_500
"""Before the doubling, of entries of their own: more than a child may lack at the cut."""
STORES = (
    "--xius=1", "--xiu-replicas=2", "--pis=1", "--pi-replicas=2", "--relays=1", "--relay-replicas=1", "--routers=1",
    "--router-replicas=1", "--brokers=1", "--broker-replicas=1", "--proxies=1", "--gateways=1",
)  # fmt: skip


class Mail:
    """Numbered mail to every user, one after another, and what a device of each gets."""

    def __init__(self, px: pixiu.Client) -> None:
        self._px = px
        self.sent = 0
        self.got: dict[int, list[int]] = defaultdict(list)

    async def send(self) -> None:
        """One mail to every user, confirmed, again and again."""
        while True:
            for uin in USERS:
                await self._px.user(uin).mail(b"%d" % self.sent)
            self.sent += 1
            await asyncio.sleep(PACE_S)

    async def send_first(self) -> None:
        """Many, each in a turn of its own."""
        for _ in range(FIRST_MAILS // len(USERS)):
            await asyncio.gather(*(self._px.user(uin).mail(b"%d" % self.sent) for uin in USERS))
            self.sent += 1

    async def receive(self, uin: int) -> None:
        """With one session that stays."""
        async with self._px.inbox(uin=uin, device="phone") as inbox:
            async for mail in inbox:
                self.got[uin].append(int(mail.payload))
                mail.acknowledge()

    async def go_on(self, rounds: int) -> None:
        """Until everybody was sent so much more."""
        wanted = self.sent + rounds
        await until(lambda: self.sent >= wanted, "mail")


async def test_stores_double_under_mail_with_the_tool_killed_in_its_phases(tmp_path: Path) -> None:
    roles = dict(portion((("pi", (Phase.LEARN, Phase.SPLIT, Phase.CLEAN)), ("xiu", (Phase.START, Phase.SPLIT, Phase.COMMIT)))))
    with running_cluster(tmp_path, *STORES, layout="nodes") as cluster:
        async with pixiu.connect(cluster.target) as px:
            mail = Mail(px)
            await mail.send_first()
            async with together(*(mail.receive(uin) for uin in USERS)):
                async with together(mail.send()):
                    for role, phases in roles.items():
                        for phase in phases:
                            code, said = await tool(cluster, role, "--to", "2", "--yes", killed_after=phase)
                            # A phase in which there was nothing left to do or to wait for kills nobody.
                            assert code == -9 or (code, said[-1]["event"]) == (0, "done"), said
                            if phase is Phase.SPLIT and code == -9:
                                (half,) = (await asyncio.to_thread(cluster.status))["doublings"]
                                assert (half["role"], half["n"], half["next"], half["partitions"]["0"]) == (role, 1, 2, "split")
                            await mail.go_on(1)
                        code, said = await tool(cluster, role, "--to", "2", "--yes")
                        assert (code, said[-1]["event"], said[-1]["partitions"]) == (0, "done", 2), said
                        # The lock of a tool that was killed goes with its session.
                        await asyncio.to_thread(wait_for, lambda: cluster.status()["doublings"] == [], "nothing under way")
                        await mail.go_on(5)
                whole = list(range(mail.sent))
                # Who was ended between two users has sent some a number more than others.
                with contextlib.suppress(AssertionError):
                    await until(lambda: all(mail.got[uin][: len(whole)] == whole for uin in USERS), "mail")
                assert {uin: got[: len(whole)] for uin, got in mail.got.items()} == dict.fromkeys(USERS, whole)
                assert all(got[len(whole) :] in ([], [len(whole)]) for got in mail.got.values())
        cluster.wait_healthy()
        layout = cluster.status()["layout"]
        for role in roles:
            assert (layout[role]["n"], layout[role]["next"]) == (2, 2)
            assert sorted(process["partition"] for process in cluster.processes(role)) == [0, 0, 1, 1]
