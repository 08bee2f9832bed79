"""Settings that change while all runs: which there are, how the registry keeps them, what they make of a process's options. Pure.

    ROOT/settings   {"version": 3, "settings": {"all.log_level": "debug", "proxy.room_messages_per_s": 500}}

A setting is TABLE.KEY: of `cluster`, of a role, or of `all` roles, over which a role's own goes. What is set there goes over a
process's own configuration; what is not, or no longer, is as configured.

Source: docs/operations.md, "Change a setting while all runs"; docs/registry.md, "Requests of operators".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, runtime_checkable

from cluster.runtime.fields import Spec, show, specs, unknown
from cluster.runtime.options import ClusterOptions, RoleOptions
from pixiu.discovery.node import integer, json_object
from pixiu.errors import InvalidArgument, MalformedData
from pixiu.ids import MAX_ID

ALL: Final = "all"
CLUSTER: Final = "cluster"
MAX_BYTES: Final = 65_536
LIVE: Final[Mapping[str, tuple[str, ...]]] = {
    CLUSTER: ("trace_fraction",),
    ALL: ("log_level",),
    "proxy": (
        "big_room_vrooms_per_s", "publisher_messages_per_s", "publisher_bytes_per_s", "room_messages_per_s", "room_bytes_per_s",
        "limit_burst_s",
    ),
    "gateway": (
        "max_connections", "connect_rate_per_s", "connect_burst", "client_messages_per_s", "client_bytes_per_s",
        "room_messages_per_s", "room_bytes_per_s", "limit_burst_s", "joins_per_s", "max_all_subscriptions", "drain_jitter_s",
        "drain_clients_per_s",
    ),
    "router": (), "broker": (), "relay": (), "xiu": (), "pi": (),
}  # fmt: skip
"""Table → what may be set of it while all runs; of each role also what is `all` roles'."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the registry has."""

    version: int = 0
    """Grows with every change; 0: nothing was ever set."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """TABLE.KEY → value, as JSON has it."""
    operator: str = ""
    """Who made the last change; empty: a release that did not say."""

    def to_json(self) -> bytes:
        """Encode as the registry keeps them."""
        fields = {"version": self.version, "settings": dict(sorted(self.values.items())), "operator": self.operator}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Settings:
        """Read them. Raises `MalformedData`."""
        fields = json_object(data, MAX_BYTES, "the node of settings")
        values = fields.get("settings")
        if not isinstance(values, dict):
            raise MalformedData("the node of settings has no table of settings")
        return cls(integer(fields, "version", 0, MAX_ID), values, str(fields.get("operator", "")))


def live_keys(table: str) -> tuple[str, ...]:
    """What may be set of a table."""
    return LIVE.get(table, ()) + (LIVE[ALL] if table not in (CLUSTER, ALL) else ())


def live_names() -> list[str]:
    """Everything that may be set."""
    return [f"{table}.{key}" for table in LIVE for key in live_keys(table)]


def spec_of(name: str, options_types: Mapping[str, type]) -> Spec:
    """What a setting may be. options_types: table → its options. Raises `InvalidArgument` for one that may not be set, with the
    nearest that may."""
    table, dot, key = name.partition(".")
    if table in LIVE and key in live_keys(table):
        return specs(options_types[table])[key]
    if table in LIVE and key in specs(options_types[table]):
        raise InvalidArgument(
            f"{name} is read only when a process starts: change its configuration, then restart the processes that have it "
            f"(docs/operations.md, "
            f'"Every setting"); of {table} may change at run time: {", ".join(live_keys(table)) or "nothing"}'
        )
    where = [each for each in LIVE if not dot and name in live_keys(each)]
    if where:
        raise InvalidArgument(f"{name} is a setting of {', '.join(where)}: name one, as in {where[0]}.{name}")
    raise InvalidArgument(unknown("setting", name, live_names()))


def value_of(name: str, text: str, options_types: Mapping[str, type]) -> Any:
    """The value of a text from the command line. Raises `InvalidArgument` with what is allowed."""
    spec = spec_of(name, options_types)
    try:
        return spec.convert_text(text)
    except ValueError as error:
        raise InvalidArgument(f"{name} = {show(text)}: must be {error}") from None


@dataclass(frozen=True, slots=True)
class Effective:
    """What a process goes by, with the settings of the registry."""

    cluster: ClusterOptions
    options: RoleOptions
    taken: Mapping[str, Any]
    """Setting → value, of those that concern this process."""
    refused: Mapping[str, str]
    """Setting → why it is left out."""


def effective(role: str, cluster: ClusterOptions, options: RoleOptions, settings: Settings) -> Effective:
    """A process's options under the settings of the registry. What it does not know, as one of an older release, or what cannot be,
    is left out."""
    taken: dict[str, Any] = {}
    refused: dict[str, str] = {}
    changes: dict[str, dict[str, Any]] = {CLUSTER: {}, role: {}}
    for table, target in ((CLUSTER, cluster), (ALL, options), (role, options)):
        known = specs(type(target))
        for name, raw in settings.values.items():
            own, _, key = name.partition(".")
            if own != table:
                continue
            if key not in live_keys(table) or key not in known:
                refused[name] = "this process has no such setting that may change at run time"
                continue
            try:
                changes[CLUSTER if table == CLUSTER else role][key] = known[key].convert(raw)
                taken[name] = raw
            except ValueError as error:
                refused[name] = f"must be {error}"
    made_cluster = replace(cluster, **changes[CLUSTER])
    made = replace(options, **changes[role])
    wrong = {**dict(made_cluster.problems()), **dict(made.problems())}
    if not wrong:
        return Effective(made_cluster, made, taken, refused)
    whole = {name: f"{key} must be {allowed}" for name in taken for key, allowed in list(wrong.items())[:1]}
    return Effective(cluster, options, {}, {**refused, **whole})


@runtime_checkable
class Reconfigurable(Protocol):
    """A service that goes by other options while it runs."""

    def on_settings(self, cluster: ClusterOptions, options: Any) -> None:
        """Go by these from now on; only what `LIVE` names differs from those before. Must be quick."""


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Setting → its value now, or None where it is as configured again; of those that differ."""
    return {name: after.get(name) for name in sorted({*before, *after}) if before.get(name) != after.get(name)}
