"""A gateway's own options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.listeners.clients import ClientListener, ClientRoleOptions
from cluster.listeners.networks import Networks
from cluster.listeners.origins import Origins
from cluster.settings.fields import bounded
from cluster.settings.options import PacedOptions

TABLE_NAME: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})?")

DRAIN_SHARE: Final = 0.8
"""Share of drain_timeout_s that moving clients may take; the rest is for notifying routers and relays."""


@dataclass(frozen=True, kw_only=True)
class Options(ClientRoleOptions, PacedOptions):
    """The [gateway] table."""

    mqtt_host: str = "127.0.0.1"
    """Address on which MQTT clients connect."""
    mqtt_insecure: bool = False
    """Whether MQTT clients may connect from other machines without a login."""
    mqtt_port: int = bounded(0, 0, 65_535)
    """Port on which MQTT clients connect; by TLS where there is a tls_certificate. 0: any."""
    mqtt_plain_port: int = bounded(0, 0, 65_535)
    """Port of MQTT without TLS beside it, where there is a tls_certificate. 0: none."""
    mqtt_plain: bool = False
    """Whether MQTT clients may log in from other machines without TLS."""
    websocket_port: int = bounded(0, 0, 65_535)
    """Port of MQTT over WebSocket (path /mqtt) at mqtt_host; by TLS where there is a tls_certificate. 0: none."""
    websocket_origins: str = ""
    """Web pages that may connect there, as origins with commas between, such as https://app.example.com; * for all. Empty: all
    where clients have to log in, else none."""
    proxy_networks: str = ""
    """Networks of balancers, with commas between, such as 10.0.0.0/8: their connections by MQTT, WebSocket and HTTP must begin with
    a header of the PROXY protocol, whose address counts as the client's. Empty: no connection may."""
    api_port: int = bounded(0, 0, 65_535)
    """Port of the HTTP API at client_host; by TLS where there is a tls_certificate. 0: none."""
    api_origins: str = ""
    """Web pages that may call the HTTP API (CORS), in the form of websocket_origins. Empty: none."""
    api_connections: int = bounded(2000, 1, 100_000)
    """Connections to the HTTP API at one time. For a new one beyond it the one that has been idle the longest is closed."""
    api_logins: int = bounded(256, 1, 10_000)
    """Logins that use the HTTP API at one time; beyond it they get 429. Each costs a connection to a proxy and some 100 KiB."""
    api_ca: str = ""
    """PEM file of the authority of the certificates that proxies, gateways and topics show to clients, or `system`: the HTTP API is
    their client. Empty: they show none."""
    max_connections: int = bounded(20_000, 1, 10_000_000)
    """Client connections of all protocols at one time; more are refused."""
    address_connections_percent: int = bounded(75, 1, 100)
    """Per cent of max_connections that one address may have. 100: all, as with a balancer in front, whose address all clients
    have."""
    max_subscriptions: int = bounded(1000, 1, 1_000_000)
    """Limit of rooms and topics of one connection."""
    max_wildcard_rooms: int = bounded(2048, 0, 1_000_000)
    """Limit of rooms that the filters with wildcards of one connection span, beyond one each: a filter that is wider than a rule of
    cluster.topic_rooms spans all rooms of the rule, and one whose first level is a wildcard spans 128. More are refused."""
    max_all_subscriptions: int = bounded(500_000, 1, 1_000_000_000)
    """Limit of rooms and topics of all connections, about half a KiB each; beyond it a connection gets no more than
    client_joins_free."""
    connection_buffer_bytes: int = bounded(2 << 20, 16 << 10, 1 << 30)
    """Bytes that may wait for one connection; beyond it the oldest messages of QoS 0 are dropped, and for QoS 1 or 2 the
    connection is closed."""
    memory_bytes: int = bounded(256 << 20, 4 << 20, 1 << 40)
    """Bytes of client input that cannot be processed yet: unfinished packets, and messages of QoS 1 that wait. Beyond it the
    connections that hold the most are closed."""
    address_memory_bytes: int = bounded(64 << 20, 2 << 20, 1 << 40)
    """The same for all connections from one address."""
    tcp_keep_alive_s: int = bounded(60, 0, 86_400)
    """Seconds of silence after which the kernel asks whether a client is still there; one that does not answer is closed after as
    long again. 0: never."""
    slow_consumer_timeout_s: float = bounded(10.0, 0.1, 3600.0)
    """Seconds for which a connection may stay over connection_buffer_bytes before it is closed."""
    puback_timeout_s: float = bounded(300.0, 1.0, 86_400.0)
    """Seconds for which a lane of an MQTT client's mail may wait for any PUBACK; then the connection is closed, and its mail is
    delivered again. Set it above the time that a client's slowest handler takes for one mail, else that client never gets past
    it."""
    receive_maximum: int = bounded(1024, 1, 65_535)
    """Messages of QoS 1 and 2 that an MQTT client may have unacknowledged: one of MQTT 5 that sends more is closed, others are not
    read from."""
    max_unacknowledged: int = bounded(256, 1, 10_000)
    """Messages of QoS 1 and 2 of rooms and topics that are sent to an MQTT client before it acknowledges some; at most what the
    client allows. More wait, up to connection_buffer_bytes."""
    topic_aliases: int = bounded(64, 1, 1000)
    """Topic aliases of a client of MQTT 5, in each direction; to the client at most what it allows."""
    max_keep_alive_s: int = bounded(65_535, 1, 65_535)
    """Longest keep-alive of a client of MQTT 5, seconds: one that asks for more, or for none, gets this one. 65535: no limit."""
    max_session_expiry_s: int = bounded(604_800, 0, 2_592_000)
    """Seconds for which the session of an MQTT client may outlive its connection: that of clients of MQTT 3 without clean session,
    and the limit of what clients of MQTT 5 ask for. 0: sessions end with their connections, as where there are no Pi and Xiu."""
    signal_table_dir: str = "/dev/shm"  # noqa: S108 (private folders are made in it)
    """Folder on a tmpfs for the table of delivered signals, which a gateway that was killed finds again."""
    signal_table_name: str = ""
    """Name of the table's folder in it. Empty: made of the registry's root, mqtt_host and the MQTT port."""
    signal_table_mb: int = bounded(16, 1, 4096)
    """MiB of memory for the table, taken at the start: for each, the last 4 000 signals, up to twice as many, are remembered."""
    socket_send_buffer_bytes: int = bounded(256 << 10, 4096, 1 << 30)
    """Bytes that the kernel holds for one MQTT connection; they count as delivered, so keep it small."""
    connect_rate_per_s: int = bounded(1000, 0, 1_000_000)
    """Clients that may connect in a second; more are refused and asked to try again later. 0: no limit."""
    connect_burst: int = bounded(2000, 1, 10_000_000)
    """Clients that may connect at once after a silence."""
    max_pending_connections: int = bounded(1000, 1, 1_000_000)
    """Limit of connections that have not logged in yet; beyond it the oldest is closed."""
    client_messages_per_s: int = bounded(0, 0, 100_000_000)
    """Messages that one MQTT client may publish in a second. More of QoS 0 is dropped; at QoS 1 the gateway stops reading the
    client.
    0: no limit."""
    client_bytes_per_s: int = bounded(0, 0, 1 << 40)
    """The same in bytes."""
    room_messages_per_s: int = bounded(0, 0, 100_000_000)
    """Messages that MQTT clients may publish to one room through this gateway in a second; more is treated the same way. 0: no
    limit."""
    room_bytes_per_s: int = bounded(0, 0, 1 << 40)
    """The same in bytes."""
    client_joins_per_s: int = bounded(200, 0, 1_000_000)
    """Rooms and topics that one connection may join and leave in a second; a faster one is not read for a while, because each join
    or leave costs every router and broker replica of a partition. 0: no limit."""
    client_joins_burst: int = bounded(2000, 1, 10_000_000)
    """Joins and leaves that one connection may send at once after a silence."""
    client_joins_free: int = bounded(20, 1, 10_000_000)
    """Joins and leaves that one connection may send at once, and one more each second, before they count against joins_per_s."""
    joins_per_s: int = bounded(1000, 0, 10_000_000)
    """Joins and leaves in a second of all connections of this gateway that have used up their client_joins_free: they wait in one
    queue, and are refused when it is longer than 20 s. 0: no limit."""
    limit_burst_s: float = bounded(1.0, 0.01, 60.0)
    """Burst that may come at once after a silence, in seconds of these rates."""
    drain_jitter_s: float = bounded(2.0, 0.0, 600.0)
    """Seconds over which clients are moved when the gateway drains, so that they do not reconnect all at once. Many take
    longer: see drain_clients_per_s."""
    drain_clients_per_s: int = bounded(1000, 0, 1_000_000)
    """Clients that are moved in a second when the gateway drains, as many as another gateway accepts; more only where four fifths
    of drain_timeout_s would not suffice. 0: no limit."""

    trace_dir: str = ""
    """Folder for the finished traces of messages that this gateway delivers, as JSON lines. Empty: they are not kept."""
    trace_file_mb: int = bounded(16, 1, 1024)
    """MiB of the largest file of traces."""
    trace_files: int = bounded(16, 1, 100_000)
    """Complete files in trace_dir, of all gateways that write to it; the oldest are removed."""
    trace_file_s: float = bounded(60.0, 1.0, 86_400.0)
    """Seconds after which a file of traces is complete at the latest, and can be read."""

    def drain_spread_s(self, clients: int) -> float:
        """Seconds over which the clients are moved when the gateway drains. Half of them is for the clients that can be notified,
        half for those that are closed, so that neither kind alone exceeds the rate."""
        at_the_rate = 2 * clients / self.drain_clients_per_s if self.drain_clients_per_s else 0.0
        return max(self.drain_jitter_s, min(at_the_rate, self.drain_last_s))

    @property
    def drain_last_s(self) -> float:
        """Seconds after the beginning of a drain by which clients have left."""
        return DRAIN_SHARE * self.drain_timeout_s

    def listen_ports(self) -> list[tuple[str, str, int]]:
        """(key, host, port) of each TCP port that must be free."""
        keys = ("mqtt_port", "mqtt_plain_port", "websocket_port")
        found = [*((key, self.mqtt_host, getattr(self, key)) for key in keys), ("api_port", self.api_host, self.api_port)]
        return [*super().listen_ports(), *(each for each in found if each[2])]

    @property
    def api_host(self) -> str:
        """Address of the HTTP API."""
        return self.client_host or self.host

    def listeners(self) -> tuple[ClientListener, ...]:
        """Listeners on which clients connect."""
        tls = bool(self.tls_certificate) and not self.mqtt_plain_port
        mqtt = ClientListener("mqtt_host", self.mqtt_host, "mqtt_insecure", self.mqtt_insecure, "mqtt_plain", self.mqtt_plain, tls)
        return (*super().listeners(), mqtt)

    def problems(self) -> Iterator[tuple[str, str]]:
        """(key, what it must be) of every option that is wrong."""
        yield from super().problems()
        if not TABLE_NAME.fullmatch(self.signal_table_name):
            yield "signal_table_name", "at most 100 letters, digits and the characters . _ - with a letter or digit first, or empty"
        if self.mqtt_plain_port and (not self.tls_certificate or self.mqtt_plain_port == self.mqtt_port):
            yield "mqtt_plain_port", "0 without a tls_certificate (mqtt_port is without TLS then), and another port than mqtt_port"
        for key in ("websocket_origins", "api_origins"):
            try:
                Origins(getattr(self, key))
            except ValueError as error:
                yield key, f"origins with commas between, or *: {error}"
        try:
            Networks(self.proxy_networks)
        except ValueError as error:
            yield "proxy_networks", f"networks with commas between, such as 10.0.0.0/8: {error}"

    def read_files(self) -> None:
        """See `RoleOptions`."""
        super().read_files()
        if self.access_file:
            from cluster.access.files import Files  # most processes do not need it

            Files(Path(self.access_file)).read()
