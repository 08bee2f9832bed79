"""Calls that may hang have threads of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from topic.offload.threads import in_thread

HANGS = """
import asyncio, threading
from topic.offload.threads import in_thread

async def main():
    asyncio.create_task(in_thread(threading.Event().wait))
    await asyncio.sleep(0.01)
    print("done")

asyncio.run(main())
"""


async def test_a_call_has_its_outcome() -> None:
    assert await in_thread(lambda: threading.current_thread().name) == "topic-store"
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_who_is_cancelled_does_not_wait() -> None:
    go_on = threading.Event()
    task = asyncio.create_task(in_thread(go_on.wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()


@pytest.mark.process
def test_a_process_ends_while_a_call_hangs() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=True)
    assert (ended.stdout, ended.stderr) == ("done\n", "")
