"""The modules that mypyc compiles, and the finder that takes what was compiled from them, or the Python.

    make native ─▶ setup.py build_ext ─▶ cluster/native/*.so + stamp.json (the SHA-256 of every source)
                                                  │
    import proxy ─▶ proxy/__init__.py ─▶ here ────┴─▶ all of them compiled, or all of them Python

What is compiled lies in a folder of its own, where no import finds it but by this finder, and only if every source is the one
that was compiled: nothing old ever runs. Compiled modules call one another without looking names up, so it is all or none
in a process: whoever has imported one of them as Python before keeps to Python. Only `PIXIU_COMPILE=1` asks for what was
compiled; plain Python is the default.

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
"""Where the compiled modules lie, below the folder that holds `cluster`."""
STAMP: Final = "stamp.json"
LIBRARY: Final = "pixiu_native"
"""How the names of the shared libraries begin, one for each package."""
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
"""What is compiled, by package: what a message passes on its way. Left out, beside all that no message passes:

    pixiu.client, pixiu.cli          users and tools: the SDK is pure Python; its publisher is compiled for gateways, which use it
    pixiu.client.awaited, .streams   a mixin with slots, which mypyc does not take, and what extends it; gateway.publishing, too
    *.service                        wait for gRPC, the disk and the registry; nothing to gain
    cluster.rpc, pixiu.rpc           wait for sockets; mypyc has no asynchronous generators
    cluster.runtime.role             the services derive from it, and a class of Python cannot derive from a compiled one
    pi.machine                       waits for threads, and is cancelled meanwhile, after which what mypyc made of that crashes
    cluster.replication.log          waits for the disk; mypyc has no `continue` inside `try … finally`
    cluster.replication.peers        mypyc has no asynchronous generators
"""


class Build(NamedTuple):
    """Which build a process runs."""

    name: str
    """`compiled` or `plain`."""
    reason: str
    """Why it is plain; empty when it is compiled."""

    def __str__(self) -> str:
        """As people read it."""
        return f"{self.name} ({self.reason})" if self.reason else self.name


def names() -> list[str]:
    """Every module that is compiled, by its full name."""
    return [f"{package}.{module}" for package, modules in MODULES.items() for module in modules.split()]


def library_of(package: str) -> str:
    """The name of a package's library, as mypyc is told."""
    return f"{LIBRARY}_{package.replace('.', '_')}"


def source_of(name: str) -> Path:
    """The Python of a module, below the root."""
    return Path(f"{name.replace('.', '/')}.py")


def hashes(root: Path = ROOT) -> dict[str, str]:
    """The SHA-256 of every module's Python, in hex; empty where there is no file."""
    found = {}
    for name in names():
        path = root / source_of(name)
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
    return found


def stamp(root: Path = ROOT) -> str:
    """What the build writes beside the compiled modules."""
    return json.dumps({"python": SUFFIX, "sources": hashes(root)}, indent=1)


def plain_because(root: Path = ROOT, switch: str = "", loaded: Sequence[str] = ()) -> str:
    """Why Python must run, in words; empty when what was compiled may.

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
    """Which build a process runs that starts in this environment: a server that this one starts, whatever this one has imported.

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
        """Where a compiled module is; None for all others."""
        if name not in self._names:
            return None
        file = str(self._root / FOLDER / f"{name}{SUFFIX}")
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


def install() -> Build:
    """Decide which build this process runs, and have imports find it."""
    build = build_of_new_process(loaded=tuple(sys.modules))
    if not build.reason:
        sys.meta_path.insert(0, Finder())
    return build


BUILD: Final = install()
"""Which build this process runs. Decided at the first import, before any of the modules above is."""
