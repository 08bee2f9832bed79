"""What listeners count comes back to zero: a place that is never free again shuts everybody out in the end, and no answer tells.

`nothing_stays_counted` is used by every test of the folders whose `conftest.py` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final

import pytest

from cluster.access.login_guard import LoginGuard
from cluster.links.stream import LinkStreams
from cluster.rpc.framed_listener import FramedListener
from gateway.clients.clients import Clients
from proxy.presence import PresenceService
from tests.support.builds import can_be_changed


def _framed(listener: FramedListener) -> dict[str, int]:
    return {"strangers": listener._strangers.total(), "open": listener.open, "tasks": len(listener._tasks)}


def _links(streams: LinkStreams) -> dict[str, int]:
    return {"silent": len(streams._silent)}


def _guard(guard: LoginGuard) -> dict[str, int]:
    sessions = len(guard.sessions)
    return {"users": guard._of_user.total() - sessions, "addresses": guard._of_address.total() - sessions}


def _clients(clients: Clients) -> dict[str, int]:
    places = clients._admission
    return {
        "pending of addresses": places.pending - sum(map(len, places._pending_of.values())),
        "connected of addresses": places.connected - sum(places._connected_of.values()),
        "holders": len(clients.memory._held.keys() - places._connected.keys() - places._pending.keys()),
    }


def _presence(service: PresenceService) -> dict[str, int]:
    return {"queries": service._of_login.total()}


COUNTS: Final[dict[type[Any], Callable[[Any], dict[str, int]]]] = {
    FramedListener: _framed, LinkStreams: _links, LoginGuard: _guard, Clients: _clients, PresenceService: _presence,
}  # fmt: skip
"""What is looked at, and what of it is to be zero."""


@pytest.fixture(autouse=True)
def nothing_stays_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Strangers, sessions, places and holders that are gone are not counted any more when a test ends. On the compiled build the
    classes that are compiled are not looked at: the plain one does."""
    made: list[Any] = []
    for kind in filter(can_be_changed, COUNTS):
        monkeypatch.setattr(kind, "__init__", _noting(kind.__init__, made))
    yield
    left = [(type(one).__name__, name, count) for one in made for name, count in COUNTS[type(one)](one).items() if count]
    assert not left, "counted although it is gone"


def _noting(init: Callable[..., None], made: list[Any]) -> Callable[..., None]:
    @wraps(init)
    def noting(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        made.append(self)

    return noting
