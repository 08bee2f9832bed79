"""One session with a registry for everything in a process that reads a cluster, kept while it is used. Blocking.

    view_of ──▶ the view of a discovery in a thread, by watches ── not asked for `IDLE_S` ──▶ session over

A session for each look would cost the registry a write at its begin and at its end, and there is one every few seconds for each
stream.

Source: docs/pipeline.md; docs/registry.md.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import Future
from typing import Final

from pixiu.discovery.target import parse_address
from pixiu.discovery.view import View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import NotServed

CONNECT_S: Final = 10.0
IDLE_S: Final = 20.0
"""Time after which a session that nobody asks ends, seconds: longer than a stream's look at it (`REFRESH_S`)."""
TURN_S: Final = 0.5
ROLES: Final = ("xiu", "pi", "proxy")
_LOCK: Final = threading.Lock()
_SESSIONS: Final[dict[tuple[int, str], _Session]] = {}
"""By process, as threads do not live on in a forked one, and target."""


class _Session:
    """A discovery with a thread of its own."""

    def __init__(self, target: str) -> None:
        self._target, self.used = target, time.monotonic()
        self.ready: Future[Discovery] = Future()
        threading.Thread(target=self._run, name="pixiu-registry", daemon=True).start()

    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except BaseException as error:  # whoever waits raises it
            if not self.ready.done():
                self.ready.set_exception(error)

    async def _keep(self) -> None:
        address = parse_address(self._target)
        zookeeper = ZooKeeper(address, connect_timeout_s=CONNECT_S)
        await zookeeper.connect()
        discovery = Discovery(zookeeper, address.root, lambda _view: None, roles=ROLES)
        try:
            await discovery.start()
            self.ready.set_result(discovery)
            while not self._is_idle():
                await asyncio.sleep(TURN_S)
        finally:
            await discovery.close()
            await zookeeper.close()

    def _is_idle(self) -> bool:
        with _LOCK:
            idle = time.monotonic() - self.used > IDLE_S
            if idle:
                _SESSIONS.pop((os.getpid(), self._target), None)
            return idle


def view_of(target: str) -> View:
    """The registry's view of a cluster, as watches have brought it. Raises RegistryUnavailable if there is no session yet and none
    can be had; NotServed if there is no cluster at this root."""
    key = os.getpid(), target
    with _LOCK:
        session = _SESSIONS.get(key) or _SESSIONS.setdefault(key, _Session(target))
        session.used = time.monotonic()
    try:
        view = session.ready.result().view
    except BaseException:
        with _LOCK:
            if _SESSIONS.get(key) is session:
                del _SESSIONS[key]
        raise
    if not view.layout.version:
        raise NotServed(f"no cluster is registered at {target}: check its root, the path after the port")
    return view
