"""A bridge process's own options, and those that all bridges to a target or from a source have.

Source: docs/bridges.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

from cluster.routes.routes import read_routes
from cluster.settings.fields import bounded, choice
from cluster.settings.options import Options as AnyOptions
from cluster.settings.options import RoleOptions
from pixiu.client.messages.load_test import LoadTest
from pixiu.client.topics.drafts import check_name
from pixiu.client.topics.topic_admin import filter_of
from pixiu.discovery.target import parse_target
from pixiu.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Options(RoleOptions):
    """The [bridge] table: what every role has, and where the bridges are described."""

    bridges: str = ""
    """File with a table for each bridge, such as [orders-to-kafka]. Empty: there are none but those of routes."""
    routes: str = ""
    """File of routes, the same as the proxies': what it says that clients get is delivered. Read again when it changes. Empty:
    there are none."""
    target: str = ""
    """Where the bridges reach the cluster as clients: HOST:PORT,… of proxies, or zk://…. Empty: the registry of the process."""
    token_file: str = ""
    """File with the login of the bridges as clients. Empty: the environment variable PIXIU_TOKEN, or none."""
    paused: tuple[str, ...] = ()
    """Names of bridges that do nothing until they are resumed; `pixiu bridge pause` and `resume` change it while all runs."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        try:
            parse_target(self.target or self.registry)
        except InvalidArgument as error:
            yield "target", f"empty, or where the cluster is: {error}"
        if not self.bridges and not self.routes:
            yield (
                "bridges",
                "given, or routes: the file with a table for each bridge (docs/bridges.md)",
            )

    def read_files(self) -> None:
        """See `RoleOptions`."""
        super().read_files()
        if self.bridges:
            import_module("bridge.catalog").read_bridges(self.bridges)  # connectors need this module
        if self.routes:
            read_routes(self.routes)


@dataclass(frozen=True, kw_only=True)
class BridgeOptions(AnyOptions):
    """Options of every bridge."""

    kind: str = ""
    """The connector, such as to-webhook or from-mqtt."""
    topic: str = ""
    """The durable topic that the bridge reads or writes; it must be there."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        try:
            check_name(self.topic)
        except InvalidArgument as error:
            yield "topic", f"the name of a durable topic: {error}"


@dataclass(frozen=True, kw_only=True)
class TargetOptions(BridgeOptions):
    """Options of every bridge from a topic to a target."""

    load_test: ClassVar[LoadTest] = "block"
    """Whether messages of load tests come; see `DurableTopic.channel`."""

    channel: str = ""
    """Channel of the topic that the bridge reads; it is made if it is missing. Empty: bridge-NAME."""
    ordered: bool = False
    """Whether the messages of a key, or slot, reach the target in their order. Only for a channel that the bridge makes."""
    from_end: bool = False
    """Whether a channel that the bridge makes begins with what is stored from then on."""
    filter: str = ""
    """Filter of the channel: an expression such as headers["region"] == "eu". Empty: everything."""
    credit: int = bounded(1_000, 1, 10_000)
    """Messages that the bridge may have and not have finished, in each process."""
    credit_bytes: int = bounded(64 << 20, 1 << 20, 4 << 30)
    """Bytes of these messages above which the bridge receives no more, in each process."""
    batch_messages: int = bounded(100, 1, 10_000)
    """Most messages that are written at once."""
    batch_bytes: int = bounded(1 << 20, 1024, 64 << 20)
    """Most bytes of messages that are written at once; a larger message is written alone."""
    linger_ms: int = bounded(50, 0, 600_000)
    """Milliseconds for which a batch that is not full waits for more."""
    in_flight: int = bounded(1, 1, 64)
    """Batches that are written at one time. The messages of a key are never in two of them, if the channel is ordered."""
    timeout_s: float = bounded(30.0, 0.1, 3600.0)
    """Seconds for which the target may take to confirm a batch; then it counts as away, and the batch is written again."""
    max_tries: int = bounded(0, 0, 1_000_000)
    """Tries after which a message that the target refuses for now goes to the dead letters. 0: it is tried for ever, and what
    follows waits in the topic."""
    max_backoff_s: float = bounded(60.0, 0.1, 3600.0)
    """Longest wait between two tries, seconds."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        try:
            if self.channel:
                check_name(self.channel, "channel")
        except InvalidArgument as error:
            yield "channel", f"empty, or the name of a channel: {error}"
        try:
            filter_of(self.filter)
        except InvalidArgument as error:
            yield "filter", f"empty, or a filter: {error}"


@dataclass(frozen=True, kw_only=True)
class SourceOptions(BridgeOptions):
    """Options of every bridge from a source to a topic."""

    dead_topic: str = ""
    """Topic for what the topic cannot take, such as a message that is too large; it is made if it is missing. Empty: TOPIC.dead."""
    level: str = choice("replicated", "replicated", "persisted", "accepted", "stored")
    """Level at which a message counts as stored, so that the source is allowed to forget it."""
    max_unconfirmed: int = bounded(10_000, 1, 1_000_000)
    """Messages that were read and are not stored yet; above it nothing is read."""
    max_unconfirmed_bytes: int = bounded(64 << 20, 1 << 20, 4 << 30)
    """Bytes of these messages; above it nothing is read. One message more, or what one read brings, may come on top."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        try:
            check_name(self.dead_topic or f"{self.topic}.dead")
        except InvalidArgument as error:
            yield "dead_topic", f"the name of a durable topic: {error}"
