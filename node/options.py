"""The roles of a node, and their options.

    [node]      roles = ["gateway", "proxy", "broker-0", "broker-1"]; and options that all of its roles share
    [broker]    of its brokers, and over these
    [broker-1]  of the broker of partition 1

    defaults  <  TOML file  <  PIXIU_NODE_KEY, PIXIU_BROKER_KEY, PIXIU_BROKER_1_KEY  <  --set

In each of these a table of one role wins over that of its kind, and that over [node].

Source: docs/operations.md, "Nodes".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from cluster.settings.command import Table
from cluster.settings.fields import bounded, render_table, show, specs, unknown
from cluster.settings.options import (
    DEFAULT_REGISTRY,
    ClusterOptions,
    RoleOptions,
    SharedOptions,
    Sources,
    against_cluster,
    file_errors,
    is_wildcard,
    read_tables,
)
from pixiu.discovery.paths import PARTITIONED_ROLES, ROLES, UNPARTITIONED_ROLES
from pixiu.errors import ConfigurationError
from pixiu.placement.partition import MAX_PARTITIONS

ENTRY: Final = re.compile(r"([a-z]+)-(0|[1-9][0-9]{0,2})", re.ASCII)
OWN: Final = ("roles", "data_dir", "log_format")
"""Options of [node] that no role takes as they are."""


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """The [node] table. Every option but `roles` is also one of its roles, and holds for those that do not have their own."""

    roles: tuple[str, ...] = ("gateway", "proxy", "broker-0", "router-0", "relay-0")
    """Roles that this node runs: ROLE, or ROLE-PARTITION for a role with partitions."""
    data_dir: str = ""
    """Folder of the node's data. A role's data_dir is by default the folder in it that is named as in roles."""
    pace_ms: float = bounded(0.0, 0.0, 20.0)
    """Milliseconds between two wake-ups of the event loop, see [gateway]. Where its roles differ, the shortest counts."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        wrong = dict(super().problems())
        yield from wrong.items()
        if "roles" in wrong:
            return
        if not self.roles:
            yield "roles", "given: at least one role"
        for name in self.roles:
            if problem := _problem_of_entry(name):
                yield "roles", problem
        twice = {name for name in self.roles if self.roles.count(name) > 1}
        if twice:
            yield "roles", f"a list without repetition: {', '.join(sorted(twice))} is given twice"


def _problem_of_entry(name: str) -> str:
    """Return what is wrong with a name in `roles`; empty: nothing."""
    found = ENTRY.fullmatch(name)
    role = found[1] if found else name
    if role not in ROLES:
        return f"names of roles: {unknown('role', role, ROLES)}"
    if role in PARTITIONED_ROLES and found is None:
        return f"names of roles: {role} has partitions: name one, such as {role}-0"
    if role in UNPARTITIONED_ROLES and found is not None:
        return f"names of roles: {role} has no partitions: name it {role}"
    if found and int(found[2]) >= MAX_PARTITIONS:
        return f"names of roles: {name}: a partition is a number from 0 to {MAX_PARTITIONS - 1}"
    return ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A role of a node.

    name: as in `roles`.
    """

    name: str
    role: str
    options: RoleOptions


@cache
def options_of(role: str) -> type[RoleOptions]:
    """Return the type of a role's options."""
    found: type[RoleOptions] = import_module(f"{role}.options").Options
    return found


def tables() -> list[Table]:
    """Return the tables of a node's options, for --help: those of roles without what [node] has."""
    shared = specs(SharedOptions).keys()
    of_roles = [Table(role, options_of(role), [key for key in specs(options_of(role)) if key not in shared]) for role in ROLES]
    return [Table("node", Options), Table("cluster", ClusterOptions), *of_roles]


def example() -> str:
    """Render a file with every option at its default."""
    return "\n".join(render_table(table.name, table.options, table.keys) for table in tables())


class _Layers:
    """The tables of the roles that a node runs, filled from the weakest source to the strongest."""

    def __init__(self, names: Sequence[str]) -> None:
        self.cluster = Sources("cluster", ClusterOptions)
        self.node = Sources("node", Options)
        self.entries = {name: Sources(name, options_of(name.partition("-")[0])) for name in names}
        self.wrong: list[str] = []

    def known(self) -> set[str]:
        """Return the names of all tables."""
        return {"cluster", "node", *self.entries, *(name.partition("-")[0] for name in self.entries)}

    def put_all(self, said: Mapping[str, Mapping[str, tuple[Any, str]]], *, text: bool) -> None:
        """Take values of one source: table → key → (value, origin)."""
        for table in sorted(said, key=lambda name: (name != "node", "-" in name)):
            for key, (raw, origin) in said[table].items():
                for sources in self._of(table, key):
                    sources.put(key, raw, origin, text=text)

    def _of(self, table: str, key: str) -> Iterator[Sources[Any]]:
        """Yield where an option of a table goes to."""
        if table == "cluster":
            yield self.cluster
            return
        if table == "node":
            yield self.node
            if key in OWN or key not in self.node.specs:
                return
        for name, sources in self.entries.items():
            if table in (name, name.partition("-")[0]) or (table == "node" and key in sources.specs):
                yield sources


def load(path: Path | str | None, environ: Mapping[str, str], overrides: Mapping[str, str]) -> tuple[ClusterOptions, list[Entry]]:
    """Read, check and join all sources of options; arguments as of `cluster.settings.options.load_options`. A key of --set
    without a table is one of [node].

    Raises ConfigurationError with one line for each error.
    """
    file = {
        table: {key: (raw, str(path)) for key, raw in content.items()} if isinstance(content, dict) else content
        for table, content in read_tables(path).items()
    }
    said: dict[str, dict[str, tuple[str, str]]] = {}
    for name, text in overrides.items():
        table, dot, key = name.partition(".")
        said.setdefault(table if dot else "node", {})[key if dot else name] = text, f"--set {name}"
    layers = _Layers(_names(file, environ, said))
    _check_tables(layers, path, file, said)
    layers.put_all({table: content for table, content in file.items() if isinstance(content, dict)}, text=False)
    layers.put_all(_of_environment(environ, layers.known()), text=True)
    layers.put_all(said, text=True)
    layers.node.build()
    for name, sources in layers.entries.items():
        _settle(name, sources, layers.node)
    if not layers.entries or any("registry" not in sources.origins for sources in layers.entries.values()):
        layers.wrong.append(f"registry is not given: name the cluster to join, such as --set registry={DEFAULT_REGISTRY}")
    cluster = layers.cluster.build()
    built = {name: sources.build() for name, sources in layers.entries.items()}
    wrong = [*layers.wrong, *layers.node.wrong, *layers.cluster.wrong]
    wrong += [text for sources in layers.entries.values() for text in sources.wrong]
    entries = [Entry(name, name.partition("-")[0], options) for name, options in built.items() if options is not None]
    if not wrong and cluster is not None:
        wrong += [text for entry in entries for text in against_cluster(entry.role, entry.name, cluster, entry.options)]
        wrong += _conflicts(entries)
        wrong += [text for entry in entries for text in file_errors(entry.options)]
    if wrong or cluster is None:
        raise ConfigurationError("\n".join(dict.fromkeys(wrong)))
    for role in {entry.role for entry in entries}:
        cluster.tls(role)
    cluster.key_ring()  # an unusable file is found here, before any socket opens
    return cluster, entries


def _names(
    file: Mapping[str, Any], environ: Mapping[str, str], said: Mapping[str, Mapping[str, tuple[str, str]]]
) -> tuple[str, ...]:
    """Return `roles` of the strongest source. Raises ConfigurationError."""
    only = Sources("node", Options)
    content = file.get("node", {})
    if isinstance(content, dict) and "roles" in content:
        only.put("roles", *content["roles"], text=False)
    if "PIXIU_NODE_ROLES" in environ:
        only.put("roles", environ["PIXIU_NODE_ROLES"], "environment variable PIXIU_NODE_ROLES", text=True)
    if "roles" in said.get("node", {}):
        only.put("roles", *said["node"]["roles"], text=True)
    if not only.origins and not only.wrong:
        example = ",".join(Options.roles)
        raise ConfigurationError(f"roles is not given: name the roles to run, such as --set node.roles={example}")
    found = only.build()
    if found is None or only.wrong:
        raise ConfigurationError("\n".join(only.wrong))
    return found.roles


def _check_tables(layers: _Layers, path: object, file: Mapping[str, Any], said: Mapping[str, object]) -> None:
    """Note unknown tables. A file may have tables of roles that run elsewhere; --set may not."""
    known = layers.known()
    running = f"this node runs {', '.join(layers.entries)}"
    for name, content in file.items():
        if name not in known and name not in ROLES:
            text = f"[{name}]: {running}" if ENTRY.fullmatch(name) else unknown("table", name, {*ROLES, *known})
            layers.wrong.append(f"{path}: {text}")
        elif not isinstance(content, dict):
            layers.wrong.append(f"{path}: {name} = {show(content)}: must be a table, [{name}]")
    for name in said:
        if name not in known:
            elsewhere = name in ROLES or ENTRY.fullmatch(name)
            layers.wrong.append(f"--set {name}.…: {running if elsewhere else unknown('table', name, known)}")


def _of_environment(environ: Mapping[str, str], known: set[str]) -> dict[str, dict[str, tuple[str, str]]]:
    """Return the options in the environment: table → key → (text, origin)."""
    prefixes = {f"PIXIU_{name.upper().replace('-', '_')}_": name for name in known}
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for variable in sorted(environ):
        prefix = max((prefix for prefix in prefixes if variable.startswith(prefix)), key=len, default="")
        if prefix:
            key = variable.removeprefix(prefix).lower()
            found.setdefault(prefixes[prefix], {})[key] = environ[variable], f"environment variable {variable}"
    return found


def _settle(name: str, sources: Sources[Any], node: Sources[Options]) -> None:
    """Set what the node decides for a role: its partition, its default folder, the form of log lines."""
    partition = name.partition("-")[2]
    if partition:
        if sources.values.get("partition", int(partition)) != int(partition):
            sources.wrong.append(f"{sources.origins['partition']}: [{name}] partition: must be left out: {name} in roles says it")
        sources.values["partition"] = int(partition)
    if node.values.get("data_dir") and "data_dir" not in sources.values:
        sources.put("data_dir", str(Path(node.values["data_dir"]) / name), node.origins["data_dir"], text=False)
    log_format = node.values.get("log_format", Options.log_format)
    if sources.values.get("log_format", log_format) != log_format:
        sources.wrong.append(
            f"{sources.origins['log_format']}: [{name}] log_format: must be left out: a process has one, in [node]"
        )
    sources.values["log_format"] = log_format


def _conflicts(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield an error for each port and each folder that two roles claim."""
    ports: list[tuple[str, str, int]] = []
    folders: dict[Path, str] = {}
    for entry in entries:
        own = [(f"[{entry.name}] {key}", host, port) for key, host, port in entry.options.listen_ports()]
        for key, host, port in own:
            for other, there, taken in ports:
                if port == taken and (host == there or is_wildcard(host) or is_wildcard(there)):
                    yield f"{key} = {port}: must be another port than {other}"
        ports += own
        folder = Path(entry.options.data_dir).absolute()
        if entry.options.data_dir and (taken_by := folders.setdefault(folder, entry.name)) != entry.name:
            yield f"[{entry.name}] data_dir = {show(entry.options.data_dir)}: must be another folder than that of {taken_by}"
