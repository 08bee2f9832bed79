"""`pixiu.testing.cluster`: what a user's own tests run against. It works, shows devices by name, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pixiu
import pixiu.testing
from pixiu.client.stores.view import InboxView
from tests.support.cluster import wait_for

HOLD = """
import sys, time
import pixiu.testing
with pixiu.testing.cluster(mail=False) as cluster:
    print(cluster.logs, flush=True)
    time.sleep(600)
"""


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names a folder, or whose output goes there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                shown = (entry / "cmdline").read_bytes() + os.fsencode(os.readlink(entry / "fd" / "1"))
            except OSError:
                continue
            if os.fsencode(folder) in shown:
                found.append(int(entry.name))
    return found


async def test_a_cluster_for_tests_carries_rooms_signals_and_mail_and_leaves_nothing() -> None:
    shared_before = set(os.listdir("/dev/shm"))
    async with pixiu.testing.cluster() as cluster:
        folder = cluster.logs.parent.parent
        assert processes_of(folder)
        async with pixiu.connect(cluster.target, publish_timeout_s=30.0, join_timeout_s=30.0) as px:
            async with px.subscribe(room=42) as messages:
                await px.room(42).send(b"hello")
                await px.room(42).signal(b"now", receipt=True)
                assert {(await anext(messages)).payload, (await anext(messages)).payload} == {b"hello", b"now"}
            async with px.inbox(uin=7, device="phone") as phone, px.inbox(uin=7, device="téléphone fixe") as desk:
                await px.user(7).mail(b"kept")
                for inbox in (phone, desk):
                    mail = await anext(inbox)
                    assert mail.payload == b"kept"
                await asyncio.wait_for(phone.flush(), 30)
            async with InboxView(cluster.target) as view:
                _, normal = await view.unread(7)
                assert {(device.name, device.unread) for device in normal.devices} == {("phone", 1), ("téléphone fixe", 1)}

            def looked() -> set[str]:
                with pixiu.SyncInboxView(cluster.target) as view:
                    return {device.name for device in view.unread(7)[1].devices}

            assert await asyncio.to_thread(looked) == {"phone", "téléphone fixe"}
        assert cluster.mqtt
        assert cluster.gateways
        assert cluster.proxies
    assert not folder.exists()
    assert processes_of(folder) == []
    new = set(os.listdir("/dev/shm")) - shared_before
    assert not [name for name in new if "pixiu" in name and folder.name in name]


@pytest.mark.parametrize("mail", [True, False])
def test_all_is_well_with_several_gateways(mail: bool) -> None:
    with pixiu.testing.cluster(gateways=2, mail=mail) as cluster:
        command = [sys.executable, "-m", "tools.cli.main", "status", "--json", "--target", cluster.target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = json.loads(done.stdout)
    assert (said["problems"], done.returncode) == ([], 0)
    assert [process["healthy"] for process in said["processes"] if process["role"] == "gateway"] == [True, True]


def test_it_ends_with_the_program_that_started_it_however_that_ends() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().strip()).parent
        assert processes_of(folder)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    wait_for(lambda: not processes_of(folder), "the end of every process")
    shutil.rmtree(folder.parent)
