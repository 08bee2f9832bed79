"""The modules that mypyc compiles, and the finder that imports either the compiled modules or the Python.

    make native ─▶ setup.py build_ext ─▶ cluster/native/*.so + stamp.json (the SHA-256 of every source)
                                                  │
    import proxy ─▶ proxy/__init__.py ─▶ here ────┴─▶ all of them compiled, or all of them Python

Compiled modules are in a folder of their own, where only this finder finds them, and only if every source is the one that was
compiled: nothing outdated ever runs. Compiled modules call one another without looking names up, so a process uses all or none: one
that has already imported a module as Python stays with Python. Only `PIXIU_COMPILE=1` selects compiled modules; plain Python is the
default.

Source: docs/performance.md, docs/decisions/0234-compiled-or-plain-never-both.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = "cluster/native"
"""Folder of the compiled modules, below the folder that holds `cluster`."""
STAMP: Final = "stamp.json"
LIBRARY: Final = "pixiu_native"
"""Prefix of the names of the shared libraries, one for each package."""
SWITCH: Final = "PIXIU_COMPILE"
SUFFIX: Final = EXTENSION_SUFFIXES[0]

MODULES: Final = {
    "pixiu": "ids",
    "pixiu.client": "publisher",
    "pixiu.wire": "cursor envelope levels record",
    "pixiu.placement": "big_rooms ordered_routes partition split weights",
    "pixiu.mqtt": "codec decoder events mail packets server topics",
    "cluster.links": (
        "acknowledgement api endpoint fragments head heartbeat key_ring link liveness outbox peer_link receiver refusals sender "
        "sequence stats stream switch window"
    ),
    "cluster.membership": (
        "anti_entropy devices digest events forwards instance_purge isolation lww_map member_core member_state "
        "replica_anti_entropy replica_core replica_state subscribers"
    ),
    "cluster.replication": (
        "applier clock context core entry events follower insync leader messages proposals segment states wire"
    ),
    "cluster.rpc": "frames",
    "cluster.runtime": "contract handler histogram hot_keys layout_notices parcels received_batches token_bucket",
    "proxy": (
        "big_rooms core destinations events mail mail_batches mail_events mail_notices mail_requests mail_results "
        "offline_notices permits presence publisher rates signals"
    ),
    "broker": "core events fanout feeds multicast",
    "router": "core events",
    "gateway": (
        "access admission backlog clients controls core dedupe devices events feedback join_share mail mail_lane mail_queue "
        "mail_run membership_reporter memory_budget mqtt mqtt_publishing paced_fanout rates rooms signals slow_consumers "
        "subscriber traces"
    ),
    "relay": "chat core events login_conflicts mail_answers mail_core mail_devices mail_events",
    "relay.delivery": "events limits saving session sessions slots states window",
    "pi": "checks chunk core deletions events inbox inbox_table keys ranges reading state unwritten view",
    "xiu": "asking batch block core dedupe events keys machine readers reading state table",
}
"""Compiled modules by package: those that a message passes. Of these the following are left out:

    pixiu.client, pixiu.cli          users and tools: the SDK is pure Python; its publisher is compiled for gateways, which use it
    pixiu.client.awaited, .streams   a mixin with slots, which mypyc refuses, and its subclasses; gateway.publishing, too
    *.service                        wait for gRPC, the disk and the registry; nothing to gain
    cluster.rpc, pixiu.rpc           wait for sockets; mypyc has no asynchronous generators
    cluster.runtime.role             the services derive from it, and a class of Python cannot derive from a compiled one
    pi.machine                       waits for threads and is cancelled meanwhile, after which mypyc's code crashes
    cluster.replication.log          waits for the disk; mypyc has no `continue` inside `try … finally`
    cluster.replication.peers        mypyc has no asynchronous generators
"""


class Build(NamedTuple):
    """The build that a process runs."""

    name: str
    """`compiled` or `plain`."""
    reason: str
    """Reason for the plain build; empty if compiled."""

    def __str__(self) -> str:
        """Format for people."""
        return f"{self.name} ({self.reason})" if self.reason else self.name


def names() -> list[str]:
    """Return every compiled module by its full name."""
    return [f"{package}.{module}" for package, modules in MODULES.items() for module in modules.split()]


def library_of(package: str) -> str:
    """Return the name of a package's library for mypyc."""
    return f"{LIBRARY}_{package.replace('.', '_')}"


def source_of(name: str) -> Path:
    """Return the path of a module's Python source, relative to the root."""
    return Path(f"{name.replace('.', '/')}.py")


def hashes(root: Path = ROOT) -> dict[str, str]:
    """Return the SHA-256 of every module's source, in hex; empty if there is no file."""
    found = {}
    for name in names():
        path = root / source_of(name)
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
    return found


def stamp(root: Path = ROOT) -> str:
    """Return the stamp that the build writes beside the compiled modules."""
    return json.dumps({"python": SUFFIX, "sources": hashes(root)}, indent=1)


def plain_because(root: Path = ROOT, switch: str = "", loaded: Sequence[str] = ()) -> str:
    """Explain, in words, why Python must run; empty if the compiled modules may.

    Args:
        root: the folder that holds `cluster`.
        switch: the value of `PIXIU_COMPILE`; `0` asks for Python.
        loaded: the modules that the process has imported.
    """
    path = root / FOLDER / STAMP
    try:
        text = path.read_bytes()
    except OSError:
        return "nothing was compiled"
    if switch == "0":
        return f"{SWITCH} is not 1"
    try:
        said = json.loads(text)
        python, sources = str(said["python"]), dict(said["sources"])
    except (ValueError, KeyError, TypeError):
        return f"{path} is damaged; `make native` compiles again"
    if python != SUFFIX:
        return f"it was compiled for another Python ({python}); `make native` compiles again"
    if changed := sorted(name for name, digest in hashes(root).items() if sources.get(name) != digest):
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"{source_of(changed[0])}{more} changed after it was compiled; `make native` compiles again"
    if early := sorted(set(loaded) & sources.keys()):
        return f"{early[0]} was imported as Python before"
    return ""


def build_of_new_process(root: Path = ROOT, loaded: Sequence[str] = ()) -> Build:
    """Return the build that a process started in this environment would run, such as a server that this process starts.

    Args: see `plain_because`.


    Args: see `plain_because`.
    """
    reason = plain_because(root, os.environ.get(SWITCH, "0"), loaded)
    return Build("plain" if reason else "compiled", reason)


class Finder(MetaPathFinder):
    """Finds the compiled modules in their folder."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._names = {*names(), *(f"{library_of(package)}__mypyc" for package in MODULES)}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a compiled module; None for all others."""
        if name not in self._names:
            return None
        file = str(self._root / FOLDER / f"{name}{SUFFIX}")
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


def install() -> Build:
    """Choose this process's build, and install the finder if it is compiled."""
    build = build_of_new_process(loaded=tuple(sys.modules))
    if not build.reason:
        sys.meta_path.insert(0, Finder())
    return build


BUILD: Final = install()
"""The build of this process, chosen at the first import, before any of the modules above is imported."""
