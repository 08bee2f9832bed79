"""`pixiu doctor`: inspects the machine and the cluster, and shows the findings of `ops.doctor.diagnosis`.

Source: docs/operations.md, "Is it set up right?".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape
from rich.table import Table

from cluster.settings.options import ClusterOptions, RoleOptions
from onebox.embedded import four_letter_word
from onebox.java import find_java
from ops.doctor import diagnosis as d
from pixiu.discovery.node import Node
from pixiu.discovery.target import names_registry, parse_address
from pixiu.discovery.view import View
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError, InvalidArgument, RemoteError
from pixiu.rpc.tls import own
from registry.session import read_view, registry_of
from tools.cli.http import fetch
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json

AT_ONCE: Final = 16
"""Processes asked at a time."""
WORD_TIMEOUT_S: Final = 2.0
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (the default place of the roles' tables)
BUFFERS: Final = ("rmem_max", "wmem_max")
COLORS: Final = {d.Grade.OK: "green", d.Grade.WARNING: "yellow", d.Grade.FAILURE: "red"}
SIGNS: Final = {d.Grade.OK: "✓", d.Grade.WARNING: "!", d.Grade.FAILURE: "✗"}


@guarded
def doctor(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            help="Data directory whose disk is checked; may be repeated. Default: those of the processes here, or run.",
            metavar="DIR",
        ),
    ] = None,
    machine: Annotated[bool, typer.Option("--machine", help="Check this machine only; ask no cluster.")] = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine and the cluster are set up right, and show what to do. Exit code 1: something is a failure."""
    folders: set[Path] = set()
    findings = asyncio.run(read_cluster(target, folders)) if not machine else []
    findings += read_machine(data or one_a_disk(folders) or [Path("run")])
    failed = any(finding.grade is d.Grade.FAILURE for finding in findings)
    if as_json:
        shown = [{"check": one.check, "grade": one.grade.value, "said": one.said, "do": one.do} for one in findings]
        print_json({"failed": failed, "findings": shown}, indent=2)
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for one in findings:
            color = COLORS[one.grade]
            table.add_row(f"[{color}]{SIGNS[one.grade]}[/]", escape(one.check), escape(one.said))
            if one.do:
                table.add_row("", "", f"[{color}]{escape(one.do)}[/]")
        console().print(table)
    if failed:
        raise typer.Exit(1)


async def read_cluster(target: str, folders: set[Path]) -> list[d.Finding]:
    """Ask ZooKeeper and every process. Raises `InvalidArgument` when the target names proxies.

    folders: receives the data folders of processes on this machine.
    """
    if not names_registry(target):
        raise InvalidArgument(f"--target {target}: the doctor asks the registry; give zk://HOST:PORT/ROOT, or --machine")
    address = parse_address(target)
    tls = own() if address.tls else None
    context = tls.client_context() if tls is not None else None
    answers = {server: await asyncio.to_thread(_srvr, server, context) for server in address.hosts.split(",")}
    registry = d.check_registry(answers)
    if not any(answers.values()):
        return [registry]
    try:
        async with registry_of(target) as (zookeeper, root):
            view = await read_view(zookeeper, root)
            clocks = [clock] if view.layout.version and (clock := await _registry_clock(zookeeper, root)) else []
    except RemoteError as error:
        return [registry, d.Finding("layout", d.Grade.FAILURE, str(error), "does a majority of the ZooKeeper servers run?")]
    silent: dict[int, str] = {}
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(node: Node) -> None:
        async with slots:
            try:
                clock, folder = await _said(node)
            except (OSError, ValueError) as error:
                silent[node.endpoint] = str(error) or "no answer in time"
                return
            clocks.extend([clock] if clock is not None else [])
            if folder and _is_here(node.host):
                folders.add(Path(folder))

    await asyncio.gather(*(ask(node) for node in view.nodes))
    return [registry, d.check_layout(view), *_of_processes(view, silent, clocks)]


def _of_processes(view: View, silent: dict[int, str], clocks: list[d.Clock]) -> list[d.Finding]:
    if not view.nodes:
        return []
    return [
        d.check_answers(view, silent),
        d.check_versions(view),
        d.check_settings(view),
        *d.check_bridges(view),
        d.check_clocks(clocks),
    ]


def _srvr(server: str, context: ssl.SSLContext | None) -> str:
    host, _, port = server.rpartition(":")
    return four_letter_word(int(port), "srvr", WORD_TIMEOUT_S, host.strip("[]"), context)


async def _said(node: Node) -> tuple[d.Clock | None, str]:
    """Return a process's clock and data folder; None and "" if it does not report them. Raises OSError, ValueError without a
    proper answer."""
    before = time.time_ns()
    _, body = await fetch(node.host, node.http_port, "/health")
    after = time.time_ns()
    said = json.loads(body)
    told, folder = (said.get("unix_ms"), said.get("data_dir")) if isinstance(said, dict) else (None, None)
    clock = _between(d.node_name(node), before, told, after) if isinstance(told, int) else None
    return clock, folder if isinstance(folder, str) else ""


def _is_here(host: str) -> bool:
    """Return True if an address belongs to this machine."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.bind((host.strip("[]"), 0))
        return True
    return False


def one_a_disk(folders: Iterable[Path]) -> list[Path]:
    """Return one folder for each disk: the common parent of the given folders on it."""
    disks: dict[int, list[Path]] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            disks.setdefault(folder.stat().st_dev, []).append(folder)
    return sorted(Path(os.path.commonpath(here)) for here in disks.values())


async def _registry_clock(zookeeper: ZooKeeper, root: str) -> d.Clock | None:
    """Read ZooKeeper's clock from the creation time of a short-lived node."""
    before = time.time_ns()
    try:
        path = await zookeeper.create(f"{root}/doctor", ephemeral=True, sequence=True)
        after = time.time_ns()
        stat = await zookeeper.exists(path)
        with contextlib.suppress(RemoteError):
            await zookeeper.delete(path)
    except RemoteError:
        return None
    return _between("ZooKeeper", before, stat.created_ms, after) if stat is not None else None


def _between(name: str, before_ns: int, told_ms: int, after_ns: int) -> d.Clock:
    return d.Clock(name, told_ms - (before_ns + after_ns) / 2e6, (after_ns - before_ns) / 2e6 + 1)


def read_machine(folders: list[Path]) -> list[d.Finding]:
    """Check this machine: disks, shared memory, buffers, limits, interfaces, Java."""
    cluster, role = ClusterOptions(), RoleOptions()
    try:
        java = find_java()
        java_finding = d.check_java(f"{java.version} at {java.path} ({java.source})", "")
    except ConfigurationError as error:
        java_finding = d.check_java("", str(error))
    return [
        *(d.check_space(_space(folder)) for folder in folders),
        d.check_shared_memory(_space(SHARED_MEMORY)),
        d.check_buffers(_buffers(), role.receive_buffer_bytes),
        d.check_mtu(_interfaces(), cluster.mtu_bytes, cluster.loopback_mtu_bytes),
        d.check_open_files(_open_files()),
        java_finding,
    ]


def _space(folder: Path) -> d.Space:
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    stat = os.statvfs(there)
    free_files = stat.f_favail if stat.f_files else -1  # btrfs and others have no table of inodes
    writable = os.access(there, os.W_OK | os.X_OK) and there.is_dir()
    return d.Space(str(folder), stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize, free_files, writable)


def _buffers() -> dict[str, int]:
    found = {}
    for name in BUFFERS:
        with contextlib.suppress(OSError, ValueError):
            found[f"net.core.{name}"] = int(Path(f"/proc/sys/net/core/{name}").read_text())
    return found


def _interfaces() -> list[d.Interface]:
    found = []
    for folder in sorted(Path("/sys/class/net").glob("*")):
        with contextlib.suppress(OSError, ValueError):
            mtu, flags = int((folder / "mtu").read_text()), int((folder / "flags").read_text(), 16)
            found.append(d.Interface(folder.name, mtu, flags))
    return found


def _open_files() -> int:
    """Soft limit of the shell that runs this command, because the command has raised its own; -1: no limit, or unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{os.getppid()}/limits").read_text().splitlines():
            if line.startswith("Max open files"):
                soft = line.split()[3]
                return int(soft) if soft.isdecimal() else -1
    return -1
