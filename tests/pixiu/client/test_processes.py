"""What the SDK does to its process: how it ends, and what a child made by fork is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import pixiu
from pixiu.errors import NotConnected

CANCELLED = """
import asyncio, sys, pixiu
async def asked(px):
    try:
        async with asyncio.timeout(0.003):
            await px.presence([1])
    except (TimeoutError, pixiu.PixiuError):
        pass
async def main():
    async with pixiu.connect(sys.argv[1]) as px:
        for _ in range(4):
            await asyncio.gather(*(asked(px) for _ in range(1000)))
asyncio.run(main())
print("ended")
"""
END_S = 30


@pytest.mark.process
def test_a_process_ends_after_thousands_of_cancelled_calls(background: Any, empty_cluster: Any) -> None:
    """Known fault of grpcio (grpc/grpc #40989): without a reference of its own its last thread waits for ever."""
    background.run(empty_cluster.start())
    try:
        command = [sys.executable, "-c", CANCELLED, empty_cluster.target]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
        assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr
    finally:
        background.run(empty_cluster.stop())


@pytest.mark.process
def test_a_child_is_told_that_the_client_was_opened_before_the_fork(background: Any, empty_cluster: Any) -> None:
    background.run(empty_cluster.start(proxies=1, gateways=1))
    (proxy,) = empty_cluster.proxies
    try:
        with pixiu.connect_sync(empty_cluster.target) as px, px.subscribe(room=1) as subscription:
            room = px.room(1)
            room.send(b"x")
            proxy.holding = True
            receipt = room.send_soon(b"its outcome is not known yet")
            uses: tuple[Callable[[], object], ...] = (
                lambda: px.room(1),
                lambda: room.send(b"y"),
                lambda: room.send_soon(b"y"),
                lambda: px.user(7).mail(b"y"),
                lambda: next(subscription),
                receipt.wait,
                px.flush,
                pixiu.connect_sync(empty_cluster.target).open,
            )
            child = os.fork()
            if not child:
                told = 0
                for use in uses:
                    try:
                        use()
                    except NotConnected as error:
                        told += "fork" in str(error)
                px.close()
                os._exit(told)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == len(uses)
            proxy.holding = False
            px.room(1).send(b"the parent goes on")
    finally:
        background.run(empty_cluster.stop())
