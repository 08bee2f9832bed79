"""The programs of `examples/` as a reader starts them, against one small cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import pixiu
from tests.support.cluster import LocalCluster, running_cluster

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]
PATIENT_S = 110.0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Every role once."""
    folder = tmp_path_factory.mktemp("examples")
    with running_cluster(folder, "--xius=1", "--pis=1", "--topics=1", layout="small") as cluster:
        cluster.wait_healthy()
        yield cluster


def command(name: str, *arguments: str) -> list[str]:
    """How an example is started."""
    return [sys.executable, str(ROOT / "examples" / name), *arguments]


def environment(cluster: LocalCluster) -> dict[str, str]:
    """A reader's, who exports what `pixiu up` printed."""
    return {**os.environ, "PIXIU_TARGET": cluster.target}


def output(cluster: LocalCluster, name: str, *arguments: str) -> str:
    """What an example prints until it ends, with exit code 0."""
    result = subprocess.run(
        command(name, *arguments), env=environment(cluster), capture_output=True, text=True, timeout=PATIENT_S, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_player_sees_every_signal_once(small: LocalCluster) -> None:
    shown = output(small, "game_signals.py", "1101")
    assert "4 signals were delivered" in shown
    for uin in (5001, 5002, 5003):
        assert f"player {uin} saw\n  1 the match begins\n  2 goal for blue\n  3 goal for red\n  4 the match is over\n" in shown


@pytest.mark.parametrize("time", ["first", "second"])
def test_both_devices_show_every_mail_and_a_dead_letter_is_sent_again(small: LocalCluster, time: str) -> None:
    """Twice: what one run leaves behind is no trouble to the next."""
    shown = output(small, "notifications.py", "7101").splitlines()
    assert shown.count("dead letter: picture of the parcel: RuntimeError: no screen for pictures, 3 attempts") == 1, time
    for device, pictures in (("phone", 2), ("desk", 1)):
        assert shown.count(f"{device}: your parcel left") == 1
        assert shown.count(f"{device}: picture of the parcel") == pictures
        assert shown.count(f"{device}: your parcel arrived") == 1
    assert shown[-1] == "nothing waits any more"


async def test_the_bot_answers_and_ends_at_ctrl_c(small: LocalCluster) -> None:
    bot = subprocess.Popen(
        command("bot.py", "1142"), env=environment(small), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert bot.stdout is not None
        assert await asyncio.to_thread(bot.stdout.readline) == "listening in room 1142\n"
        async with pixiu.connect(small.target, uin=7) as px, px.subscribe(room=1142) as messages, asyncio.timeout(PATIENT_S):
            await px.room(1142).send(b"!ping")
            assert [(await anext(messages)).payload for _ in range(2)] == [b"!ping", b"pong, user 7"]
        bot.send_signal(signal.SIGINT)
        _, errors = await asyncio.to_thread(bot.communicate, None, PATIENT_S)
        assert (bot.returncode, errors) == (0, "")
    finally:
        bot.kill()
        bot.wait()


@pytest.mark.parametrize("topic", ["first", "second"])
def test_every_order_is_billed_once_and_one_of_them_at_the_second_attempt(small: LocalCluster, topic: str) -> None:
    shown = output(small, "orders.py", f"orders-{topic}").splitlines()
    assert shown[0] == "12 orders are stored"
    billed = sorted(shown[1:13], key=lambda line: int(line.split()[2]))
    assert billed == [
        f"billed order {number} of customer-{number % 3}{', attempt 2' if number == 5 else ''}" for number in range(1, 13)
    ]
    assert shown[13:] == [*(f"customer-{number} has 4 orders" for number in range(3)), "0 orders wait for billing"]


def test_events_of_an_account_stay_in_order_while_the_topic_is_split(small: LocalCluster) -> None:
    shown = output(small, "change_events.py", "ledger").splitlines()
    assert shown == ["4 accounts with 25 events each, 0 out of order", "the topic has 2 open parts, 1 sealed"]


def test_a_job_that_is_started_again_stores_what_is_new(small: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "readings.csv"
    lines = [f"sensor-{number % 5},{number}\n" for number in range(30)]
    file.write_text("".join(lines[:20]))
    assert output(small, "nightly_load.py", str(file)) == "20 lines, began after line 0, stored 20\n"
    file.write_text("".join(lines))
    assert output(small, "nightly_load.py", str(file)).endswith("stored 10\n")
    assert output(small, "nightly_load.py", str(file)).endswith("stored 0\n")


async def test_devices_at_home_are_shown_live_and_their_alarms_reach_those_who_bound_them(small: LocalCluster) -> None:
    port = str(small.mqtt_ports()[0])
    home = subprocess.Popen(
        command("iot/home.py", "--mqtt-port", port, "--port", "0"), env=environment(small), stdout=subprocess.PIPE, text=True
    )
    try:
        assert home.stdout is not None
        url = (await asyncio.to_thread(home.stdout.readline)).strip()
        asked = {"user": "7301", "uin": 7301, "action": "subscribe", "topic": "devices/device-1/telemetry"}
        async with (
            aiohttp.ClientSession() as http,
            pixiu.connect(small.target, client="at-home") as px,
            px.inbox(uin=7301, device="phone") as inbox,
            asyncio.timeout(PATIENT_S),
        ):

            async def may() -> bool:
                async with http.post(f"{url}/ask", json=asked) as answer:
                    return bool((await answer.json())["allow"])

            assert not await may()
            async with http.post(f"{url}/bindings", data='{"user": "7301", "device": "device-1"}') as answer:
                assert answer.status == 200
            assert await may()
            async with http.get(url) as page, http.get(f"{url}/events") as events:
                assert "EventSource" in await page.text()
                devices = ("iot/devices.py", "--port", port, "--devices", "1", "--seconds", "5")
                simulated = asyncio.create_task(asyncio.to_thread(output, small, *devices))
                shown: list[dict[str, Any]] = []
                while not shown or shown[-1].get("status") != "offline":
                    line = await events.content.readline()
                    shown += [json.loads(line[6:])] if line.startswith(b"data: ") else []
                assert await simulated == "10 readings of 1 devices\n"
            readings = [said for said in shown if said["what"] == "telemetry"]
            assert len(readings) == 10
            assert [number for number, said in enumerate(readings) if said.get("alarm")] == [6]
            mail = await anext(aiter(inbox))
            assert (mail.payload, mail.lane) == (b"smoke at device-1: 0.04", 0)
            async with http.delete(f"{url}/bindings", data='{"user": "7301", "device": "device-1"}') as answer:
                assert answer.status == 200
            assert not await may()
            async with http.post(f"{url}/bindings", data="{}") as answer:
                assert answer.status == 400
    finally:
        home.kill()
        home.wait()
