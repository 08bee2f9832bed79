"""Faults that a run can be played with: a few words of a production function are replaced by others.

A function that does not have these words any more ends the test that plants the fault in it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import cluster.replication.replica
import cluster.replication.storage.disk
import cluster.replication.storage.folder
import cluster.replication.storage.label
import cluster.replication.storage.log
import cluster.replication.storage.segment
import pi.service
import pi.store.machine
import pi.store.store
import xiu.service
import xiu.store.machine
import xiu.store.store


@dataclass(frozen=True)
class Fault:
    """In one function."""

    where: Any
    """A class or a module."""
    name: str
    words: tuple[tuple[str, str], ...]
    """What stands there once, and what takes its place."""
    seed: int
    """A seed that finds it."""
    behind: str = ""
    """A folder: cuts are made behind each sync of its names, too. For what another sync mends soon after."""
    killed: tuple[str, int] | None = None
    """The first life ends by a kill before this sync of a file whose path ends so; the second is cut at each of its first syncs.
    For what an opening must do when a process was killed."""

    besides: tuple[tuple[Any, str, tuple[tuple[str, str], ...]], ...] = ()
    """The same in more functions: of what several places do, so that one of them alone is no fault."""

    def made(self) -> list[tuple[Any, str, Any]]:
        """The functions with the fault, and where they go. Raises AssertionError when their words are not what they were."""
        own = self.where, self.name, self.words
        return [(where, name, _made(where, name, words)) for where, name, words in (own, *self.besides)]


def _made(where: Any, name: str, words: tuple[tuple[str, str], ...]) -> Any:
    function = getattr(where, name)
    text = textwrap.dedent(inspect.getsource(function))
    for old, new in words:
        assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}: plant the fault in what it is now"
        text = text.replace(old, new)
    module = sys.modules[function.__module__]
    made: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + text, function.__code__.co_filename, "exec"), vars(module), made)
    return made[name]


_Log: Final = cluster.replication.storage.log.SegmentedLog
_Label: Final = cluster.replication.storage.label.LabelFile
_Folder: Final = cluster.replication.storage.folder.DataFolder
_ROSE: Final = "label.seal.counter > self.now.seal.counter and label == self.now._replace(seal=label.seal)"
_FILE_SYNCED: Final = "            try:\n                os.fsync(fd)\n"
_SEALS: Final = "    self._wanted = self._wanted._replace(seal=max(self._wanted.seal, self.last))\n    self._write_label()\n"
_CLEANS: Final = "    for segment in self._segments:\n        segment.dirty = False\n"
_REFUSES: Final = "                return False\n            self._label"
_CHECKED: Final = "await asyncio.to_thread(self._checked, folder)", "pass"
_FLUSHED: Final = "ev.Flushed(self._machine.flushed)"

FAULTS: Final[dict[str, Fault]] = {
    "a sync reaches only the newest segment": Fault(
        _Log, "begin_sync", (("in self._segments if segment.dirty", "in self._segments[-1:] if segment.dirty"),), 3
    ),
    "a promise lags with the seal": Fault(
        _Label, "may_lag", ((_ROSE, _ROSE.replace(" > ", " >= ").replace(")", ", promised=label.promised)")),), 1
    ),
    "Pi: what is applied after the transaction counts as flushed": Fault(
        pi.store.machine.Machine, "_flush", (("self.flushed = counter", "self.flushed = self.applied"),), 4
    ),
    "Pi: a transaction's root is not synced": Fault(pi.store.machine.Machine, "_write", (("self.store.sync()", "pass"),), 0),
    "Xiu: what is applied after the flush counts as flushed": Fault(
        xiu.store.store.Store, "flush", (("max(self.flushed, counter)", "max(self.flushed, self.head.applied.counter)"),), 3
    ),
    "an incarnation lags with the seal": Fault(
        _Label, "may_lag", ((_ROSE, _ROSE.replace(" > ", " >= ").replace(")", ", incarnation=label.incarnation)")),), 1
    ),
    "a new segment's name is not synced": Fault(_Log, "_create", (("    sync_directory(self.directory)\n", ""),), 3),
    "what was appended during a sync is sealed with it": Fault(
        _Log, "_raise_seal", (("counter, self._limit = self._limit, None", "counter, self._limit = self.last.counter, None"),), 1
    ),
    "what was appended during a sync counts as clean": Fault(
        _Log, "_raise_seal", (("    with self._lock:\n", _CLEANS + "    with self._lock:\n"),), 0
    ),
    "the log's opening takes the page cache for the disk": Fault(
        _Log, "_make_durable", (("            segment.write_again(max(seal, segment.base.counter))", "            pass"),), 0,
        killed=(".log", -1),
    ),
    "a label that a killed process made is not made durable": Fault(
        _Label, "__init__", (("    self.write(self.now)  #", "    if found is None: self.write(self.now)  #"),), 0,
        killed=("log/label", 0),
    ),
    "Pi's file has its name before it is synced": Fault(pi.store.store, "_make", (("made.sync(True)", "pass"),), 4, "inboxes"),
    "a sync is said to reach what waits for the next": Fault(
        cluster.replication.storage.disk.Syncer, "_group_synced",
        (('self._on_synced(ticket, "")', 'self._on_synced(self._wanted, "")'),), 0,
    ),
    "a group counts as synced with its first segment": Fault(
        cluster.replication.storage.disk.Syncer, "_segment_synced", (("len(dirty) == 1 and log", "log"),), 1
    ),
    "a group that the kernel has synced does not wait for its promise": Fault(
        _Log, "end_sync", ((_REFUSES, _REFUSES.replace("False", "True")),), 4
    ),
    "nothing waits for the disk": Fault(
        cluster.replication.replica.Replica, "_do",
        (("self._syncer.want(ticket)", "self._syncer.want(ticket), self._step(ev.Synced(ticket))"),), 0,
    ),
    "the log goes up to what is applied": Fault(
        cluster.replication.replica.Replica, "_tick", ((_FLUSHED, _FLUSHED.replace("flushed)", "applied)")),), 5
    ),
    "Pi: an opening takes the page cache for the disk": Fault(
        pi.store.machine.Machine, "_opened", (("store.sync()", "pass"),), 0, killed=("inboxes/data.mdb", -1)
    ),
    "Pi: pages are not synced before their root": Fault(
        pi.store.store.StateStore, "__init__", (("metasync=False", "sync=False"),), 0
    ),
    "Xiu: the name of a loaded store is not synced": Fault(
        xiu.store.machine, "_rename", (("    sync_directory(name.parent)\n", ""),), 7,
        besides=((xiu.store.store, "make_directory", (("sync_directory(each.parent)", "pass"),)),),
    ),
    "Xiu: a store is closed before the one that takes its place is open": Fault(
        xiu.store.machine.Machine, "_load",
        (("        new = await", "        await self._in_thread(self.store.close)\n        new = await"),), 315,
    ),
    "a received snapshot's files are not synced": Fault(
        _Folder, "accept_incoming", ((_FILE_SYNCED, _FILE_SYNCED.replace("os.fsync(fd)", "pass")),), 7
    ),
    "a received snapshot's manifest is not synced": Fault(
        _Folder, "accept_incoming", (("os.fsync(file.fileno())", "pass"),), 7, "replica/log"
    ),
    "a received snapshot's name is not synced": Fault(
        _Folder, "accept_incoming", (("    sync_directory(self.path)\n", ""),), 7, "replica/log"
    ),
    "Pi: every live replica counts as a copy": Fault(
        pi.service.Service, "_applied", (("answers, copies))", "answers, len(self._replica._live)))"),), 22
    ),
    "Xiu: every live replica counts as a copy": Fault(
        xiu.service.Service, "_apply", (("self._replica.copies", "len(self._replica._live)"),), 7
    ),
    "a new member file is not synced": Fault(
        cluster.replication.storage.log, "load_member", (("        os.fsync(file.fileno())\n", ""),), 0
    ),
    "a new folder's name is not synced": Fault(
        cluster.replication.storage.log, "make_directory", (("sync_directory(each.parent)", "pass"),), 0
    ),
    "the names in a received snapshot are not synced": Fault(
        _Folder, "accept_incoming", (("        sync_directory(Path(folder))\n", ""),), 7, "replica/log",
        besides=(  # a store that is opened for a check syncs them, too
            (pi.store.machine.Machine, "check", (_CHECKED,)),
            (xiu.store.machine.Machine, "check", (_CHECKED,)),
        ),
    ),
    "entries are cut before the seal goes down": Fault(
        _Log, "cut",
        (
            ("    self._write_label()\n", ""),
            ("        self._tail = [entry for entry in self._tail if entry.counter <= after]\n",
             "        self._tail = [entry for entry in self._tail if entry.counter <= after]\n    self._write_label()\n"),
        ), 9,
    ),
    "a reset begins before the label says so": Fault(_Log, "reset", (("    self._write_label()\n", ""),), 13),
    "Xiu: a torn MANIFEST is not cut": Fault(xiu.store.store.Store, "_open", (("not self._cut_torn_tail()", "True"),), 3),
    "Xiu: a flush is not waited for": Fault(xiu.store.store.Store, "flush", (("db.flush()", "db.flush(False)"),), 1),
    "an opening does not look at the CRC": Fault(
        cluster.replication.storage.segment, "decode_one", (("zlib.crc32(data[offset + 8 : behind]) != crc", "False"),), 6
    ),
    "an opening seals nothing": Fault(
        _Log, "_make_durable", (("self.last.counter > max(seal, self.first.counter)", "False"),), 4
    ),
    # No fault here lets a sync under way seal beyond a cut: no run has such a cut. A follower gets entries from a leader that it
    # has answered, which it does when its promise is durable, and every older entry with it. `test_log.py` has such a sync.
    "the seal stays beyond a cut": Fault(_Log, "cut", (("self._wanted.seal.counter > after", "False"),), 8),
    "Pi: a snapshot takes its place before it is synced": Fault(
        pi.store.machine, "install", (("os.fsync(file.fileno())", "pass"),), 30, "inboxes"
    ),
    "an opening syncs no names": Fault(
        _Log, "_make_durable", (("sync_directory(self.directory)", "pass"),), 0, killed=("replica/log", -1),
        besides=(
            (_Label, "__init__", (("    sync_directory(directory)\n", ""),)),
            (cluster.replication.storage.log, "load_member", (("    sync_directory(directory)\n", ""),)),
        ),
    ),
    "the seal is written before what it seals is synced": Fault(
        _Log, "begin_sync", (("    return dirty", _SEALS + "    return dirty"),), 0
    ),
}  # fmt: skip


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """With a fault, by its name; empty: without."""
    if not name:
        yield
        return
    made = FAULTS[name].made()
    before = [(where, function, getattr(where, function)) for where, function, _ in made]
    for where, function, new in made:
        setattr(where, function, new)
    try:
        yield
    finally:
        for where, function, old in before:
            setattr(where, function, old)
