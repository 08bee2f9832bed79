"""A cluster over three machines of a network with an MTU of 1,400 bytes: mixed sizes of room messages, none waits or is lost.

this namespace: ZooKeeper, proxy, publisher      machine 1: router, broker      machine 2: gateway, subscriber
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import pixiu
from onebox.embedded import EmbeddedZooKeeper
from tests.support.cluster import PIXIU, status_of, wait_for
from tests.support.namespaces import Network, network
from tests.support.room_listener import body_of

pytestmark = pytest.mark.e2e
WAIT_S = 120.0
ROOMS = (42, 43, 44, 45)
MESSAGES = 400
AT_ONCE = 10
SIZES = {7: 60_000, 3: 2048, 5: 20_000}
"""By the last digit of a message's number: one in ten each; the others are small."""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Network, str]]:
    folder = tmp_path_factory.mktemp("namespaces")
    with network(2) as found, EmbeddedZooKeeper(folder / "zookeeper", host=found.address) as server:
        target = f"zk://{server.address}/small"
        words = [PIXIU, "layout", "set", "router=1x1", "broker=1x1", "proxy=1", "gateway=1", "--target", target]
        subprocess.run(words, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)
        inner, outer = found.machines
        try:
            for machine, role, settings in (
                (inner, "router", [f"data_dir={folder}/router"]),
                (inner, "broker", []),
                (None, "proxy", ["client_host=127.0.0.1"]),
                (outer, "gateway", ["client_host=127.0.0.1", "mqtt_host=127.0.0.1", f"signal_table_dir={folder}"]),
            ):
                found.role(machine, role, folder / f"{role}.log", f"registry={target}", *settings)
            wait_for(lambda: healthy(found, target, folder), "a healthy status", pause_s=0.2)
            yield found, target
        finally:
            codes = found.stop()
    assert codes == [0, 0, 0, 0], logs(folder)


def logs(folder: Path) -> str:
    return "\n".join(f"{path.name}\n{path.read_text()}" for path in folder.glob("*.log"))


def healthy(found: Network, target: str, folder: Path) -> bool:
    assert found.all_run(), logs(folder)
    try:
        processes = status_of(target)["processes"]
    except pixiu.PixiuError:
        return False
    return {one["role"] for one in processes if one["state"] == "Running"} == {"router", "broker", "proxy", "gateway"}


async def test_messages_of_mixed_sizes_arrive_whole_and_in_order(machines: tuple[Network, str]) -> None:
    """Ten at once, then those ten are read: for a gateway that does not run for a moment more would wait than a broker keeps, and
    it drops and counts them."""
    found, target = machines
    listener = found.machines[1].run(["-m", "tests.support.room_listener", target, *map(str, ROOMS)], subprocess.PIPE)
    assert listener.stdout is not None
    try:
        assert (await asyncio.to_thread(listener.stdout.readline)).split() == [b"joined"]
        sent: dict[int, list[tuple[int, int]]] = {room: [] for room in ROOMS}
        got: dict[int, list[tuple[int, int]]] = {room: [] for room in ROOMS}
        async with pixiu.connect(target) as px:
            for first in range(1, MESSAGES + 1, AT_ONCE):
                receipts = []
                for number in range(first, first + AT_ONCE):
                    room, size = ROOMS[number // AT_ONCE % len(ROOMS)], SIZES.get(number % 10, 200)
                    sent[room].append((number, size))
                    receipts.append(px.room(room).send_soon(body_of(number, size)))
                async with asyncio.timeout(WAIT_S):
                    for receipt in receipts:
                        await receipt
                for _ in receipts:
                    room, number, size, good = map(int, await next_line(listener, target, sent, got))
                    assert good
                    got[room].append((number, size))
        assert got == sent
    finally:
        listener.kill()
        listener.communicate()


async def next_line(listener: subprocess.Popen[bytes], target: str, sent: object, got: object) -> list[bytes]:
    """What the listener got; where nothing comes, what was sent and got until then, and what every process dropped."""
    assert listener.stdout is not None
    try:
        line = await asyncio.wait_for(asyncio.to_thread(listener.stdout.readline), WAIT_S)
    except TimeoutError:
        dropped = [(one["role"], one["links"]) for one in status_of(target)["processes"]]
        raise AssertionError(f"sent {sent}, got {got}, dropped {dropped}") from None
    return line.split()
