"""The modules that mypyc compiles, and the finder that imports either the compiled modules or the Python.

    make native ─▶ setup.py build_ext ─▶ cluster/native/*.so + stamp.json (the SHA-256 of every source)
                                                  │
    import proxy ─▶ proxy/__init__.py ─▶ here ────┴─▶ all of them compiled, or all of them Python

Compiled modules are in a folder of their own, where only this finder finds them, and only if every source is the one that was
compiled: nothing outdated ever runs. Compiled modules call one another without looking names up, so a process uses all or none: one
that has already imported a module as Python stays with Python. `PIXIU_COMPILE=1` (anything but 0) selects compiled modules; plain
Python is the default.

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
    "pixiu.wire": "cursor envelope levels record",
    "pixiu.placement": "big_rooms filter_tree ordered_routes partition split topics weights",
    "cluster.mqtt": (
        "codec decoder events fields inbound mail outbound packets properties properties_in_records reason_codes server states "
        "subscriptions terms"
    ),
    "cluster.links": (
        "api datagrams.acknowledgement datagrams.fragments datagrams.head datagrams.heartbeat datagrams.sequence endpoint link "
        "local local_core peer.liveness peer.outbox peer.peer_link peer.receiver peer.schedule peer.sender peer.switch peer.window "
        "refusals stats stream"
    ),
    "cluster.trust": "key_ring",
    "cluster.membership": (
        "events map.anti_entropy map.devices map.digest map.instance_purge map.isolation map.lww_map map.updates member.core "
        "member.state replica.anti_entropy replica.core replica.forwards replica.state replica.subscribers"
    ),
    "cluster.replication": (
        "applier core.clock core.context core.core core.events core.follower core.insync core.leader core.messages core.states "
        "peers.wire proposals storage.entry storage.segment"
    ),
    "cluster.store": "events",
    "cluster.rpc": "frames",
    "cluster.core": "contract layout_notices parcels reading_gate runner token_bucket",
    "cluster.listeners": "handler link_table",
    "cluster.metrics": "histogram hot_keys received_batches",
    "proxy": (
        "core events mail.batches mail.pipeline mail.requests mail.results mail_events notices.mail_notices presence "
        "publishers.permits publishers.rates records.big_rooms records.destinations records.gateway_batches "
        "records.offline_notices records.publisher records.signals"
    ),
    "bridge": "core events",
    "broker": "core events fanout feeds multicast",
    "router": "core events",
    "gateway": (
        "clients.access clients.admission clients.backlog clients.client_ids clients.clients clients.deliveries "
        "clients.join_share clients.join_steps clients.memory_budget clients.paced_fanout clients.publishing clients.rates "
        "clients.slow_consumers confirming core delivery.dedupe delivery.fan_out delivery.mail delivery.retained delivery.signals "
        "delivery.traces events grpc.subscriber mail.lane mail.queue mail.run membership.controls membership.devices "
        "membership.feedback membership.reporter membership.rooms mqtt.connection mqtt.login mqtt.publishing mqtt.sockets "
        "mqtt.subscribing wills.core wills.events"
    ),
    "relay": (
        "chat core delivery.events delivery.limits delivery.saving delivery.session delivery.sessions delivery.slots "
        "delivery.states delivery.window events login_conflicts mail.answers mail.core mail.devices mail.events "
        "wills.core wills.events"
    ),
    "pi": (
        "checks core events inboxes.chunk inboxes.deletions inboxes.inbox inboxes.inbox_table inboxes.ranges inboxes.reading "
        "inboxes.unwritten keys serving state store.view"
    ),
    "xiu": (
        "batches core events interfaces records.asking records.batch records.block records.table state.dedupe state.keys "
        "state.readers state.state store.machine store.reading"
    ),
}
"""Compiled modules by package: those that a message passes, and what derives from their classes. Of these the following are left
out:

    pixiu.client                          users: the SDK is pure Python
    *.service                             wait for gRPC, the disk and the registry; nothing to gain
    cluster.rpc, pixiu.rpc                wait for sockets; mypyc has no asynchronous generators
    cluster.core.role                     services derive from it, and a class of Python cannot derive from a compiled one
    pi.store.machine                      waits for threads and is cancelled meanwhile, after which mypyc's code crashes
    cluster.replication.storage.log       waits for the disk; mypyc has no `continue` inside `try … finally`
    cluster.replication.peers.peers       mypyc has no asynchronous generators
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
