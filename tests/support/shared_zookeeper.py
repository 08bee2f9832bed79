"""One ZooKeeper for all tests of a run. Each has a root of its own in it, or leaves nothing behind."""

from __future__ import annotations

import itertools
import tempfile

from onebox.embedded import EmbeddedZooKeeper

_shared: list[tuple[EmbeddedZooKeeper, tempfile.TemporaryDirectory[str]]] = []
_roots = itertools.count(1)


def shared_server() -> EmbeddedZooKeeper:
    """The server, started for the first test that needs it. Tests leave it running."""
    if not _shared:
        folder = tempfile.TemporaryDirectory(prefix="pixiu-zookeeper-")
        _shared.append((EmbeddedZooKeeper(folder.name), folder))
        _shared[0][0].start()
    return _shared[0][0]


def end_shared_server() -> None:
    """End it, if there is one, when the run ends."""
    while _shared:
        server, folder = _shared.pop()
        server.stop()
        folder.cleanup()


def own_root() -> str:
    """A root that no other test of the run has."""
    return f"/test{next(_roots)}"
