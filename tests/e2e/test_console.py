"""The console of a cluster in a headless Chromium: each page shows what is there, and a button does what its command does."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import pixiu
from tests.support.browser import CHROMIUM, Browser
from tests.support.cluster import LocalCluster, running_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")]
AXE = Path(os.environ.get("PIXIU_AXE", "/nonexistent"))
"""axe.min.js of the npm package axe-core, which is not the product's: without it its checks are left out."""
PAGES = ("map", "clients", "rooms", "inbox?uin=7", "topics", "topics?name=orders", "paths", "growth", "bridges", "security", "try")
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two of every role, with mail and topics; the leading admin has all paths probed."""
    folder = tmp_path_factory.mktemp("console")
    probes = ("--set=admin.probe_interval_ms=500", f"--set=admin.probe_file={folder}/availability.json")
    with running_cluster(folder, "--xius=1", "--pis=1", "--topics=1", *probes, layout="nodes") as one:
        one.wait_healthy()
        yield one


@asynccontextmanager
async def console(target: str) -> AsyncIterator[str]:
    """A console; yields its URL with the token."""
    command = (sys.executable, "-m", "ops.console", "--target", target, "--port", "0")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]{43}", url)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


async def enter(browser: Browser, url: str) -> None:
    """Open the console, and wait until it has taken the token."""
    await browser.open(url)
    await browser.wait("document.querySelector('#page')?.childElementCount")


async def shown(browser: Browser, page: str) -> str:
    """The text of a page, once it is there."""
    # The page of before goes first, so that its text is not taken for the new one's.
    clear = "document.querySelector('#page').replaceChildren()"
    await browser.run(f"{clear}; location.hash = {page!r}; window.dispatchEvent(new HashChangeEvent('hashchange'))")
    await browser.wait("document.querySelector('#page')?.childElementCount && !document.querySelector('#failure')")
    return str(await browser.run("document.querySelector('#content').innerText"))


async def press(browser: Browser, label: str) -> None:
    """Press a button, and confirm it."""
    await browser.run(f"[...document.querySelectorAll('main button')].find((each) => each.ariaLabel === {label!r}).click()")
    await browser.wait("document.querySelector('dialog[open] button.main')")
    await browser.run("document.querySelector('dialog button.main').click()")


async def fill(px: pixiu.Client) -> None:
    """A topic with a channel and two messages, and mail."""
    await px.topics.create("orders", parts=2, if_missing=True)
    await px.topics.set_channel("orders", "billing")
    async with px.durable_topic("orders").writer() as writer:
        await writer.send(b"two apples", key=b"ann", headers={"kind": "fruit"})
        await writer.send(b"one car", key=b"bob", headers={"kind": "car"})
    async with px.mail_writer() as mails:
        mails.send(7, b"a letter")


async def serious(browser: Browser) -> list[Any]:
    """What axe finds in the page that an operator could not use."""
    await browser.run(AXE.read_text() + "; 0")
    found = await browser.run(
        "axe.run().then((found) => found.violations.map((each) => [each.id, each.impact, each.nodes[0].html]))"
    )
    return [each for each in found if each[1] in SERIOUS]


async def test_every_page_shows_what_is_there(cluster: LocalCluster, tmp_path: Path) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.mqtt_ports()[0])
    writer.write(b"\x10\x14\x00\x04MQTT\x04\x02\x00\x00\x00\x08sensor-1")
    assert (await reader.readexactly(4))[3] == 0
    async with pixiu.connect(cluster.target) as px, console(cluster.target) as url, Browser(tmp_path / "browser") as browser:
        await fill(px)
        await enter(browser, url)
        assert "healthy" in await shown(browser, "map")
        assert await browser.run("location.href.includes('token')") is False
        texts = {page: await shown(browser, page) for page in PAGES}
        assert "sensor-1" in texts["clients"]
        assert "orders" in texts["topics"]
        assert "billing" in texts["topics?name=orders"]
        assert "a letter" in texts["inbox?uin=7"]
        assert "No doubling is under way" in texts["growth"]
        assert "every path" in texts["paths"] or "no path raises an alarm" in texts["paths"]
        if AXE.exists():
            for page in PAGES:
                await shown(browser, page)
                assert await serious(browser) == [], page

        await shown(browser, "topics?name=orders")
        await browser.run("document.querySelector('input[name=filter]').value = 'headers.kind == \"car\"'")
        await browser.run("[...document.querySelectorAll('button')].find((each) => each.innerText === 'Look').click()")
        found = await browser.wait("document.querySelector('#messages tbody')?.innerText")
        assert ("one car" in found, "two apples" in found) == (True, False)

        await shown(browser, "clients")
        await press(browser, "Kick sensor-1")
        assert await reader.read() == b""
        writer.close()
        assert browser.problems == []


async def test_a_client_in_the_page_gets_what_it_publishes(cluster: LocalCluster, tmp_path: Path) -> None:
    async with console(cluster.target) as url, Browser(tmp_path / "browser") as browser:
        await enter(browser, url)
        await shown(browser, "map")
        await shown(browser, "try")
        click = "[...document.querySelectorAll('button')].find((each) => each.innerText === {!r}).click()".format
        for button, answer in (("Connect", "connected"), ("Subscribe", "subscribed"), ("Publish", "room/42  hello")):
            await browser.run(click(button))
            await browser.wait(f"document.querySelector('.log').innerText.includes({answer!r})")
        assert browser.problems == []


async def test_a_killed_process_is_seen_and_what_is_to_be_done(cluster: LocalCluster, tmp_path: Path) -> None:
    async with console(cluster.target) as url, Browser(tmp_path / "browser") as browser:
        await enter(browser, url)
        assert "healthy" in await shown(browser, "map")
        victim = cluster.processes("pi")[0]
        os.kill(int(victim["pid"]), signal.SIGSTOP)
        try:
            await browser.wait("document.querySelector('#problems')?.innerText.includes('does not answer')")
        finally:
            os.kill(int(victim["pid"]), signal.SIGCONT)
        await browser.wait("!document.querySelector('#problems')")
    cluster.wait_healthy()
