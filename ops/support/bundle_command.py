"""`pixiu support-bundle`: one archive of what a cluster and this machine show, for somebody who cannot look at them.

    summary.json            when, of which cluster, who does not answer and why, what was left out
    status.json             as `pixiu status --json`: layout, processes, versions, problems
    settings.json           what was set while the cluster runs
    machine.json            this machine: system, versions of packages, findings of `pixiu doctor --machine`
    processes/NAME/         /health and /metrics of every process
    options/NAME.json       configuration files, without the values of secrets
    logs/NAME               the ends of the log files of a folder

Source: docs/deployment.md, "A support bundle".
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import stat
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cluster.settings.fields import specs
from cluster.settings.options import NODE, read_tables
from ops.config_command import options_types
from ops.doctor.doctor_command import read_machine
from ops.support.redaction import Redaction, secret_files, secrets_of
from pixiu.discovery.node import Node
from pixiu.discovery.target import names_registry
from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument, RemoteError
from pixiu.version import __version__
from registry.session import registry_of
from registry.settings import read_settings
from tools.cli.http import fetch
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, guarded, print_result
from tools.cli.status import HTTP_AT_ONCE, ProcessStatus, judge, read_pages, read_registry, status_json

MAX_LOG_FILES: Final = 256
MIB: Final = 1 << 20
PAGES: Final = {"/health": "health.json", "/metrics": "metrics.txt"}
VARIABLES: Final = ("PIXIU_TOKEN",)
"""Environment variables whose values are secrets."""


@dataclass(slots=True)
class Bundle:
    """The files of an archive, by name, and what its summary says."""

    files: dict[str, bytes] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    """Process → why it has no pages."""
    left_out: list[str] = field(default_factory=list)
    """Files that could not be read, or only in part, and why."""
    registry: str = ""
    """Why nothing is known of the cluster; empty: it was asked."""

    def put_json(self, name: str, value: object) -> None:
        """Add a file of JSON."""
        self.files[name] = json.dumps(value, indent=2, default=str).encode() + b"\n"


@guarded
def support_bundle(
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write, which must not exist. Default: pixiu-support-TIME.tar.gz here.", metavar="FILE"),
    ] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option("--logs", help="Folder of log files, `*.log` and rotated ones; may be repeated.", metavar="DIR"),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config",
            help="Configuration file of processes; may be repeated. Secrets in the files that it names are left out everywhere.",
            metavar="FILE",
        ),
    ] = None,
    log_mb: Annotated[int, typer.Option("--log-mb", min=1, max=1024, help="MiB of each log file, from its end.")] = 8,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Collect logs, metrics, health, versions, layout and options of a cluster into one archive, without secrets and without
    messages. A process that does not answer is named in it."""
    if not names_registry(target):
        raise InvalidArgument(f"--target {target}: the processes are in the registry; give zk://HOST:PORT/ROOT")
    place = out or Path(time.strftime("pixiu-support-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime()))
    tables = {path: read_tables(path) for path in config or ()}
    bundle = asyncio.run(_collect(target))
    bundle.put_json("machine.json", machine())
    secrets, unread = known_secrets(tables)
    if unread:
        leave_out_texts(bundle, unread, [*tables, *(logs or ())])
    else:
        for path, content in tables.items():
            bundle.put_json(_unused(bundle.files, f"options/{path.name}.json"), _redacted(content))
        for folder in logs or ():
            add_logs(bundle, folder, log_mb * MIB)
    bundle.put_json("summary.json", _summary(target, bundle))
    write(place, bundle.files, Redaction(secrets))
    value = {"file": str(place), "files": len(bundle.files), "silent": bundle.silent, "left_out": bundle.left_out}
    lines = [f"{place}: {len(bundle.files)} files, {place.stat().st_size / MIB:.1f} MiB"]
    lines += [f"! the cluster was not asked: {bundle.registry}"] if bundle.registry else []
    lines += [f"! {name}: {why}" for name, why in bundle.silent.items()]
    lines += [f"! {text}" for text in bundle.left_out]
    print_result(value | {"registry": bundle.registry}, "\n".join(lines), as_json=as_json)


def known_secrets(tables: Mapping[Path, Mapping[str, Any]]) -> tuple[frozenset[bytes], dict[Path, str]]:
    """Return the secrets in variables and in files that the configuration and the environment name, and the files of them that
    this user cannot read, with the reason."""
    paths: list[Path] = []
    for path, content in tables.items():
        own = [table for table in content.values() if isinstance(table, dict)]
        paths += secret_files(own, path.parent)
    named = {name.lower(): value for name, value in os.environ.items() if name.startswith("PIXIU_") and name not in VARIABLES}
    found, unread = secrets_of([*paths, *secret_files([named], Path())])
    return found | {os.environ[name].encode() for name in VARIABLES if os.environ.get(name)}, unread


def leave_out_texts(bundle: Bundle, unread: Mapping[Path, str], texts: Iterable[Path]) -> None:
    """Name the secrets that cannot be read, and leave out the texts that may hold them: logs and configuration files. The pages of
    processes stay, which have no secrets and which everybody who reaches their ports may read."""
    bundle.left_out += [f"{path}: may hold secrets and cannot be read: {why}" for path, why in unread.items()]
    why = "secrets that cannot be read cannot be removed from it; run the command as a user who may read them"
    bundle.left_out += [f"{text}: left out: {why}" for text in texts]


def machine() -> dict[str, Any]:
    """Describe this machine: its system, the packages that Pixiu needs, and what `pixiu doctor --machine` finds."""
    packages: dict[str, str] = {}
    for name in ("pixiu-cluster", "pixiu-sdk"):
        for wanted in metadata.requires(name) or () if _version_of(name) else ():
            package = wanted.split(";")[0].strip().split(" ")[0].split("[")[0].split(">")[0].split("=")[0].split("<")[0]
            if package not in packages and (version := _version_of(package)):
                packages[package] = version
    return {
        "version": __version__,
        "python": sys.version,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": dict(sorted(packages.items())),
        "findings": [
            {"check": one.check, "grade": one.grade.value, "said": one.said, "do": one.do} for one in read_machine([Path()])
        ],
    }


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


async def _collect(target: str) -> Bundle:
    """Ask the registry and every process. A registry that does not answer is a finding."""
    bundle = Bundle()
    try:
        address, view, _ = await read_registry(target)
        async with registry_of(target) as (zookeeper, root):
            settings = await read_settings(zookeeper, root)
    except RemoteError as error:
        bundle.registry = str(error)
        return bundle
    found = judge(address, view, await _ask_all(view, bundle))
    bundle.put_json("status.json", status_json(found, time.time_ns() // 1_000_000))
    bundle.put_json("settings.json", {"version": settings.version, "values": dict(settings.values)})
    return bundle


async def _ask_all(view: View, bundle: Bundle) -> list[ProcessStatus]:
    slots = asyncio.Semaphore(HTTP_AT_ONCE)

    async def ask(node: Node) -> ProcessStatus:
        place = f"processes/{node.role}" + (f"-{node.partition}" if node.partition >= 0 else "") + f"-{node.replica}"
        async with slots:
            try:
                pages = {page: await fetch(node.host, node.http_port, page) for page in PAGES}
                said = json.loads(pages["/health"][1])
            except (OSError, ValueError) as error:
                why = f"does not answer ({str(error) or 'no answer in time'})"
                silent = ProcessStatus(node, False, why, silent=True)
                bundle.silent[f"{silent.name} at {node.address}"] = why
                return silent
        for page, name in PAGES.items():
            bundle.files[f"{place}/{name}"] = pages[page][1]
        return read_pages(node, pages["/health"][0], said if isinstance(said, dict) else {}, pages["/metrics"][1])

    return list(await asyncio.gather(*map(ask, view.nodes)))


def _redacted(content: Mapping[str, Any]) -> dict[str, Any]:
    types = options_types()
    known = {name: list(specs(options)) for name, options in types.items()}
    every = sorted({key for keys in known.values() for key in keys} | {"roles"})
    for name in content:  # tables of a node and of one of its roles, such as [broker-1]
        known.setdefault(name, every if name == NODE or name.rpartition("-")[0] in known else [])
    return Redaction().tables(content, known)


def add_logs(bundle: Bundle, folder: Path, most_bytes: int) -> None:
    """Add the ends of the log files directly in a folder. Raises `InvalidArgument` when it is none, or cannot be read."""
    try:
        paths = sorted(path for path in folder.iterdir() if ".log" in path.suffixes)
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgument(f"--logs {folder}: is not a folder") from None
    except OSError as error:
        raise InvalidArgument(
            f"--logs {folder}: the folder cannot be read: {error.strerror}; run the command as a user who may read it"
        ) from None
    if len(paths) > MAX_LOG_FILES:
        bundle.left_out.append(f"{folder}: {len(paths) - MAX_LOG_FILES} log files beyond the first {MAX_LOG_FILES}")
    for path in paths[:MAX_LOG_FILES]:
        if path.suffix in (".gz", ".zst", ".xz"):
            bundle.left_out.append(f"{path}: is compressed, and was not searched for secrets")
            continue
        try:
            size, data = _end_of(path, most_bytes)
        except InvalidArgument as error:
            bundle.left_out.append(str(error))
            continue
        except OSError as error:
            bundle.left_out.append(f"{path}: cannot be read: {error.strerror}")
            continue
        if size > most_bytes:
            bundle.left_out.append(f"{path}: all but the last {most_bytes // MIB} MiB")
            data = data.partition(b"\n")[2]  # half a line may be half a secret
        bundle.files[_unused(bundle.files, f"logs/{path.name}")] = data


def _end_of(path: Path, most_bytes: int) -> tuple[int, bytes]:
    """Return the size and the end of a regular file. Raises `InvalidArgument` for anything else, `OSError` if it cannot be read.

    A link is not followed: who may write logs could name any file that this user may read. The file is looked at again once it is
    open, as it may be another by then.
    """
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise InvalidArgument(f"{path}: is a symbolic link, and was not followed; give --logs the folder of the file itself")
    if stat.S_ISREG(mode):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - most_bytes, 0))
                return size, file.read(most_bytes)
    raise InvalidArgument(f"{path}: is no regular file")


def _unused(files: Mapping[str, bytes], name: str) -> str:
    """A name that no file has: two folders may have logs of one name."""
    number, found = 1, name
    while found in files:
        number += 1
        found = f"{name}.{number}"
    return found


def _summary(target: str, bundle: Bundle) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": __version__,
        "target": target,
        "cluster_not_asked": bundle.registry,
        "silent": bundle.silent,
        "left_out": bundle.left_out,
        "files": sorted(bundle.files),
    }


def write(place: Path, files: Mapping[str, bytes], redaction: Redaction) -> None:
    """Write an archive that only its owner may read. Raises `InvalidArgument` when the file exists or cannot be written."""
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise InvalidArgument(f"--out {place}: cannot be made: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, data in _sorted(files):
                clean = redaction.text(data)
                head = tarfile.TarInfo(f"pixiu-support/{name}")
                head.size, head.mtime, head.mode = len(clean), int(time.time()), 0o600
                archive.addfile(head, io.BytesIO(clean))
    except OSError as error:
        place.unlink(missing_ok=True)
        raise InvalidArgument(f"--out {place}: cannot be written: {error.strerror}") from None


def _sorted(files: Mapping[str, bytes]) -> Iterable[tuple[str, bytes]]:
    return sorted(files.items(), key=lambda each: (each[0] != "summary.json", each[0]))
