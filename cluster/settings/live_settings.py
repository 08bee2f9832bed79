"""Settings that change while the cluster runs: their names, their form in the registry, their effect on a process's options. Pure.

    ROOT/settings   {"version": 3, "settings": {"all.log_level": "debug", "proxy.room_messages_per_s": 500}}

A setting is TABLE.KEY: of `cluster`, of a role, or of `all` roles; a role's own one takes precedence over that. A value set there
overrides a process's own configuration; without one the configuration applies.

Source: docs/operations.md, "Change a setting while all runs"; docs/registry.md, "Requests of operators".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, runtime_checkable

from cluster.settings.fields import Spec, show, specs, unknown
from cluster.settings.options import ClusterOptions, RoleOptions
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
    "router": (), "broker": (), "relay": (), "xiu": (), "pi": (), "topic": (), "admin": (),
    "bridge": ("paused",),
}  # fmt: skip
"""Table → keys that may be set while the cluster runs; every role also has those of `all`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in the registry."""

    version: int = 0
    """Grows with every change; 0: nothing was ever set."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """TABLE.KEY → value, as in JSON."""
    operator: str = ""
    """Author of the last change; empty: nothing was ever set."""

    def to_json(self) -> bytes:
        """Encode for the registry."""
        fields = {"version": self.version, "settings": dict(sorted(self.values.items())), "operator": self.operator}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Settings:
        """Decode from the registry. Raises `MalformedData`."""
        fields = json_object(data, MAX_BYTES, "the node of settings")
        values = fields.get("settings")
        if not isinstance(values, dict):
            raise MalformedData("the node of settings has no table of settings")
        return cls(integer(fields, "version", 0, MAX_ID), values, str(fields.get("operator", "")))


def live_keys(table: str) -> tuple[str, ...]:
    """Return the keys of a table that may be set."""
    return LIVE.get(table, ()) + (LIVE[ALL] if table not in (CLUSTER, ALL) else ())


def live_names() -> list[str]:
    """Return the names of all settings."""
    return [f"{table}.{key}" for table in LIVE for key in live_keys(table)]


def spec_of(name: str, options_types: Mapping[str, type]) -> Spec:
    """Return the specification of a setting. options_types: table → its options. Raises `InvalidArgument` for one that may not
    be set, with the nearest that may."""
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
    """Convert a text from the command line to a setting's value. Raises `InvalidArgument` with the allowed values."""
    spec = spec_of(name, options_types)
    try:
        return spec.convert_text(text)
    except ValueError as error:
        raise InvalidArgument(f"{name} = {show(text)}: must be {error}") from None


@dataclass(frozen=True, slots=True)
class Effective:
    """Options of a process under the settings of the registry."""

    cluster: ClusterOptions
    options: RoleOptions
    taken: Mapping[str, Any]
    """Setting → value, for those that concern this process."""
    refused: Mapping[str, str]
    """Setting → reason for leaving it out."""


def effective(role: str, cluster: ClusterOptions, options: RoleOptions, settings: Settings) -> Effective:
    """Apply the registry's settings to a process's options. Unknown and invalid settings are left out."""
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
    """A service that can change its options while it runs."""

    def on_settings(self, cluster: ClusterOptions, options: Any) -> None:
        """Use these options from now on; only keys in `LIVE` differ from before. Must be quick."""


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ: setting → its value now, or None if the configuration applies again."""
    return {name: after.get(name) for name in sorted({*before, *after}) if before.get(name) != after.get(name)}
