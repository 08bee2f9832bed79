"""Options of a listener for NSQ's clients.

Source: docs/nsq.md.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from cluster.settings.options import is_loopback
from nsqdoor.protocol.events import Limits
from pixiu.client.messages.load_test import LoadTest
from pixiu.errors import ConfigurationError
from pixiu.version import __version__
from pixiu.wire.block import HEAD_BYTES, INDEX_BYTES, MAX_BLOCK_BYTES

MAX_MESSAGE: Final = MAX_BLOCK_BYTES - HEAD_BYTES - INDEX_BYTES - 16
"""Largest message, bytes: with its place in a block and a time of delivery it fits a block."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options; `validate()` names the one at fault."""

    target: str
    """The cluster: zk://HOST:PORT/ROOT, with which listeners know each other, or HOST:PORT,… of proxies."""
    host: str = "127.0.0.1"
    """Address to listen at."""
    tcp_port: int = 4150
    """Port of nsqd's protocol; 0: any."""
    http_port: int = 4151
    """Port of nsqd's and nsqlookupd's HTTP; 0: any."""
    broadcast: str = ""
    """Address that clients are given; empty: `host`, or this machine's name if that is 0.0.0.0."""
    auth: bool = False
    """Each client has to log in by AUTH, or by HTTP with `Authorization: Bearer`, with a token of the cluster."""
    insecure: bool = False
    """Listen at an address that other machines reach although clients do not log in."""
    plain: bool = False
    """Listen at such an address without TLS."""
    tls_certificate: str = ""
    """PEM file of the certificate, with the key unless `tls_key` has it; empty: no TLS."""
    tls_key: str = ""
    tls_required: bool = False
    """Clients that do not ask for TLS are refused."""
    create: str = "*"
    """Topics that are created when they are first used: prefixes with commas; `*`: all; empty: none. Channels always are."""
    parts: int = 0
    """Parts of a topic that is created; 0: one for each group."""
    max_attempts: int = 0
    """Deliveries, for channels that are created, before a message becomes a dead letter; 0: the cluster's default."""
    load_test: LoadTest = "block"
    """Messages of load tests: `block` counts them as acknowledged, `pass` gives them to consumers, `only` gives nothing else."""
    headers: str = "strip"
    """Consumers that know no headers: `strip` gives them bodies alone, `require` refuses them."""
    max_connections: int = 4_000
    address_connections: int = 1_000
    """Connections from one address."""
    max_logins: int = 256
    """Logins that have a client of the cluster here at one time."""
    msg_timeout_ms: int = 60_000
    """Time that a client has for a message unless it asks for another one."""
    drain_s: float = 5.0
    """Time for publishes that are under way when the process ends, seconds."""
    log_format: str = "console"
    log_level: str = "info"

    def validate(self) -> None:
        """Check all. Raises `ConfigurationError`."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
                raise ConfigurationError(f"{field.name} = {value}: must be 0 or more")
        for name in ("tcp_port", "http_port"):
            if getattr(self, name) > 65_535:
                raise ConfigurationError(f"{name} = {getattr(self, name)}: at most 65535")
        if self.headers not in ("strip", "require"):
            raise ConfigurationError(f"headers = {self.headers!r}: strip or require")
        if self.load_test not in ("block", "pass", "only"):
            raise ConfigurationError(f"load_test = {self.load_test!r}: block, pass or only")
        if self.tls_required and not self.tls_certificate:
            raise ConfigurationError("tls_required = true: a tls_certificate is missing")
        if not is_loopback(self.host) and not self.insecure:
            if not self.auth:
                raise ConfigurationError(
                    f"host = {self.host}: clients do not log in, so give a loopback address, auth = true, or insecure = true"
                )
            if not self.tls_required and not self.plain:
                raise ConfigurationError(
                    f"host = {self.host}: tokens could be read on the way: give tls_certificate and tls_required, or plain = true"
                )

    def creates(self, topic: str) -> bool:
        """True if a topic with this name is created when it is first used."""
        prefixes = [prefix for prefix in self.create.split(",") if prefix]
        return any(prefix == "*" or topic.startswith(prefix) for prefix in prefixes)

    def limits(self) -> Limits:
        """Limits of sessions."""
        return Limits(
            version=f"1.3.0-pixiu-{__version__}",
            max_message=MAX_MESSAGE,
            msg_timeout_ms=self.msg_timeout_ms,
            tls=bool(self.tls_certificate),
            tls_required=self.tls_required,
            auth=self.auth,
            auth_required=self.auth,
            headers_required=self.headers == "require",
        )
