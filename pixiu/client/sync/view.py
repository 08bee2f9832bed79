"""Reading and managing users' inboxes without asyncio: the blocking twin of `InboxView`."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from pixiu.client.forks import BEFORE_FORK
from pixiu.client.stores.pages import NEWEST
from pixiu.client.stores.view import InboxView
from pixiu.client.sync.blocking import Background, blocking
from pixiu.errors import NotConnected


class SyncInboxView(Background):
    """`InboxView` for threads: `with SyncInboxView("zk://127.0.0.1:2181/pubsub") as view: view.page(7)`. Threads may share it.

    Args:
        target: "zk://host:port/root".

    Entering raises `InvalidArgument` for another target, and `RegistryUnavailable`.
    """

    NEWEST: Final = NEWEST

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target
        self._view: InboxView | None = None

    page = blocking(InboxView.page)
    unread = blocking(InboxView.unread)
    delete = blocking(InboxView.delete)
    acknowledge = blocking(InboxView.acknowledge)
    drop_device = blocking(InboxView.drop_device)
    dead_letters = blocking(InboxView.dead_letters)
    resend = blocking(InboxView.resend)
    drop = blocking(InboxView.drop)

    def __enter__(self) -> Self:
        if self._loop is not None:
            raise NotConnected("the view is open already; make another one")
        self.start_thread()
        try:
            self._view = self.run(self._open())
        except BaseException:
            self.stop_thread()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        view, self._view = self._view, None
        try:
            if view is not None:
                self.run(view.__aexit__(None, None, None))
        finally:
            self.stop_thread()

    def forked(self) -> None:
        """Drop all connections: this process is a child of the one that connected."""
        super().forked()
        self._view = None

    async def _open(self) -> InboxView:
        return await InboxView(self._target).__aenter__()

    @property
    def _background(self) -> Background:
        return self

    @property
    def _wrapped(self) -> InboxView:
        if self._view is None:
            raise self._not_connected()
        return self._view

    def _not_connected(self) -> NotConnected:
        if self._forked:
            return NotConnected(BEFORE_FORK)
        return NotConnected("the view is not open: use it inside `with SyncInboxView(…) as view:`")
