"""The connectors by their kinds, and the file that describes the bridges.

    [orders-to-shop]
    kind = "to-webhook"
    topic = "orders"
    url = "https://shop.example/orders"

Source: docs/bridges.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from bridge.connectors.clients import Clients, ClientsOptions
from bridge.connectors.files import Files, FilesOptions
from bridge.connectors.kafka import KafkaSource, KafkaSourceOptions, KafkaTarget, KafkaTargetOptions
from bridge.connectors.mqtt import MqttSource, MqttSourceOptions, MqttTarget, MqttTargetOptions
from bridge.connectors.nsq import NsqSource, NsqSourceOptions, NsqTarget, NsqTargetOptions
from bridge.connectors.webhook import Webhook, WebhookOptions
from bridge.options import BridgeOptions, TargetOptions
from cluster.routes.routes import Routes
from cluster.settings.fields import show, unknown
from cluster.settings.options import Sources, read_tables
from pixiu.errors import ConfigurationError

MAX_BRIDGES: Final = 256
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class Kind:
    """A connector: its options, and what makes it."""

    options: type[BridgeOptions]
    make: Callable[..., Any]
    """Makes a target or a source from the bridge's name and options."""
    alone: Callable[[Any], bool] = lambda _options: False
    """Says whether one process alone runs a bridge with these options; else all of them share its work."""
    asks: bool = False
    """True if it is made with the process's client as a third argument."""
    of_cluster: bool = False
    """True if its target is the cluster itself."""


KINDS: Final[Mapping[str, Kind]] = {
    "to-webhook": Kind(WebhookOptions, Webhook),
    "to-files": Kind(FilesOptions, Files),
    "to-kafka": Kind(KafkaTargetOptions, KafkaTarget, lambda options: bool(options.exactly_once), asks=True),
    "from-kafka": Kind(KafkaSourceOptions, KafkaSource, lambda _options: True),
    "to-clients": Kind(ClientsOptions, Clients, asks=True, of_cluster=True),
    "to-mqtt": Kind(MqttTargetOptions, MqttTarget),
    "from-mqtt": Kind(MqttSourceOptions, MqttSource, lambda _options: True),
    "to-nsq": Kind(NsqTargetOptions, NsqTarget),
    "from-nsq": Kind(NsqSourceOptions, NsqSource, lambda _options: True),
}


@dataclass(frozen=True)
class Bridge:
    """One bridge as the file describes it."""

    name: str
    options: BridgeOptions

    @property
    def kind(self) -> Kind:
        """Its connector."""
        return KINDS[self.options.kind]

    @property
    def channel(self) -> str:
        """Channel that it reads; empty: it writes the topic."""
        return (self.options.channel or f"bridge-{self.name}") if isinstance(self.options, TargetOptions) else ""

    @property
    def alone(self) -> bool:
        """True if one process alone runs it."""
        return self.kind.alone(self.options)


def read_bridges(path: Path | str) -> list[Bridge]:
    """Read and check the file of the bridges; it has at least one. Raises `ConfigurationError` with a line for each error."""
    found, wrong = list[Bridge](), list[str]()
    tables = read_tables(path, "the file of bridges")
    if not tables:
        wrong.append(f"{path}: it describes no bridge: add a table for each, such as [orders-to-shop] (docs/bridges.md)")
    if len(tables) > MAX_BRIDGES:
        wrong.append(f"{path}: these are {len(tables)} bridges; at most {MAX_BRIDGES} are allowed")
    for name, table in tables.items():
        if not NAME.fullmatch(name):
            wrong.append(f"{path}: [{show(name)}]: the name of a bridge is 1 to 64 of A-Z a-z 0-9 . _ -")
        elif not isinstance(table, dict):
            wrong.append(f"{path}: {name} = {show(table)}: must be a table, [{name}]")
        elif table.get("kind") not in KINDS:
            what = unknown("connector", str(table.get("kind", "")), KINDS) if "kind" in table else f"give kind: {', '.join(KINDS)}"
            wrong.append(f"{path}: [{name}] {what}")
        else:
            sources = Sources(name, KINDS[table["kind"]].options)
            for key, raw in table.items():
                sources.put(key, raw, str(path), text=False)
            options = sources.build()
            wrong += sources.wrong
            if options is not None:
                found.append(Bridge(name, options))
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    return found


def digest_of(bridges: Iterable[Bridge]) -> str:
    """16 hex digits that processes with the same bridges have in common, however their files are written."""
    said = {
        each.name: {
            spec.name: repr(value) for spec in fields(each.options) if (value := getattr(each.options, spec.name)) != spec.default
        }
        for each in bridges
    }
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=8).hexdigest()


def bridges_of(routes: Routes) -> list[Bridge]:
    """The bridges that deliver what routes say that clients get, one for each durable topic."""
    return [
        Bridge(
            f"clients-{each.topic}"[:64],
            ClientsOptions(
                kind="to-clients", topic=each.topic, channel="clients", ordered=True, linger_ms=0, batch_messages=500,
                from_end=each.from_end, to=each.to, routes=each.routes, stored=each.stored,
            ),
        )
        for each in routes.deliveries
    ]  # fmt: skip
