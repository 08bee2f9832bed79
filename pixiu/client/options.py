"""Options of a client with their limits; all have a default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, TypedDict

from pixiu.errors import ConfigurationError
from pixiu.ids import MAX_DEVICE
from pixiu.rpc.channels import MESSAGE_BYTES
from pixiu.wire.record import MAX_RECORD_BYTES

MAX_CLIENT_NAME_BYTES: Final = 128
MAX_DEVICE_CLASS_BYTES: Final = 64
MAX_MAIL_STREAMS: Final = 16
KINDS: Final[dict[str, tuple[Any, str]]] = {
    "float": ((int, float), "a number"),
    "int": ((int,), "an integer"),
    "str": ((str,), "text"),
}


class OptionOverrides(TypedDict, total=False):
    """Keyword arguments of `pixiu.connect` beside `uin` and `client`: the fields of `ClientOptions`."""

    connect_timeout_s: float
    publish_timeout_s: float
    mail_timeout_s: float
    mail_streams: int
    topic_timeout_s: float
    join_timeout_s: float
    queue_bytes: int
    queue_records: int
    batch_bytes: int
    batch_records: int
    window_bytes: int
    window_records: int
    device: int
    device_class: str
    receive_bytes: int
    receive_records: int
    refresh_interval_s: float
    backoff_s: float
    max_backoff_s: float
    max_record_bytes: int


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Options of a client; docs/sdk.md lists all fields. `validate()` names the option at fault."""

    connect_timeout_s: float = 5.0
    """How long `connect` tries to reach the cluster, seconds."""
    publish_timeout_s: float = 10.0
    """How long a message may stay unresolved, seconds; then it fails as `NotSent` or `OutcomeUnknown`."""
    mail_timeout_s: float = 60.0
    """How long a mail may stay unconfirmed, seconds, while it is sent again; then it fails, its outcome unknown. A change of
    leaders takes about ten seconds."""
    mail_streams: int = 1
    """Streams that carry the client's mail, each to a proxy and with a worker number of its own; UIN modulo this number chooses. A
    back end that sends much mail opens several, at most 16."""
    topic_timeout_s: float = 60.0
    """How long a message to a durable topic may stay unconfirmed, seconds, while it is sent again; then it fails as `NotSent` or
    `OutcomeUnknown`."""
    join_timeout_s: float = 10.0
    """How long `join` and `leave` wait for the cluster's confirmation, seconds."""
    queue_bytes: int = 8 << 20
    """Limit of unresolved messages, in bytes; a `send` beyond it waits."""
    queue_records: int = 100_000
    """Limit of unresolved messages, in number; a `send` beyond it waits."""
    batch_bytes: int = 256 << 10
    """Largest batch, in bytes; a larger record is sent alone."""
    batch_records: int = 1_000
    """Largest batch, in records."""
    window_bytes: int = 1 << 20
    """Limit of what is under way to one proxy, in bytes, until the proxy sends its own limit."""
    window_records: int = 20_000
    """Limit of what is under way to one proxy, in records."""
    device: int = 0
    """DeviceID of a subscriber, 1 to 2^47-1: the same number is the same device, wherever it connects. 0: the client's name
    identifies the device of a subscription with `chat`; other subscriptions are no login."""
    device_class: str = ""
    """What kind of device it is, such as "phone", at most 64 bytes; login policies may allow one of each."""
    receive_bytes: int = 8 << 20
    """A subscription's buffer, in bytes; when it is full the client stops reading."""
    receive_records: int = 50_000
    """A subscription's buffer, in messages; when it is full the client stops reading."""
    refresh_interval_s: float = 60.0
    """Interval at which proxies are asked for the cluster's processes, seconds; after a failure they are asked at once."""
    backoff_s: float = 0.1
    """The first wait after a failed connection, seconds; it doubles, and each is shortened by a random part."""
    max_backoff_s: float = 5.0
    """The longest wait after failed connections, seconds."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """Largest message, in bytes: a larger one is refused before it is sent. The cluster may allow less."""

    def validate(self) -> None:
        """Check all fields. Raises `ConfigurationError` that names the option at fault.

        Source: docs/promises.md, "Failure rules" 2.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            kind, said = KINDS[field.type if isinstance(field.type, str) else field.type.__name__]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigurationError(f"client option {field.name} = {value!r}: it must be {said}")
            if not field.name.startswith("device") and not value > 0:
                raise ConfigurationError(f"client option {field.name} = {value}: it must be above 0")
        if self.max_backoff_s < self.backoff_s:
            raise ConfigurationError(
                f"client option max_backoff_s = {self.max_backoff_s}: it must be at least backoff_s ({self.backoff_s})"
            )
        if self.mail_streams > MAX_MAIL_STREAMS:
            raise ConfigurationError(f"client option mail_streams = {self.mail_streams}: at most {MAX_MAIL_STREAMS}")
        if not 0 <= self.device <= MAX_DEVICE:
            raise ConfigurationError(f"client option device = {self.device}: it must be 0 (none) to {MAX_DEVICE}")
        if len(self.device_class.encode()) > MAX_DEVICE_CLASS_BYTES:
            raise ConfigurationError(f"client option device_class: at most {MAX_DEVICE_CLASS_BYTES} bytes")
        if self.max_record_bytes > MAX_RECORD_BYTES:
            raise ConfigurationError(f"client option max_record_bytes = {self.max_record_bytes}: at most {MAX_RECORD_BYTES}")
        if self.queue_bytes < self.max_record_bytes:
            raise ConfigurationError(
                f"client option queue_bytes = {self.queue_bytes}: at least max_record_bytes ({self.max_record_bytes})"
            )
        if self.batch_bytes > MESSAGE_BYTES // 2:
            raise ConfigurationError(f"client option batch_bytes = {self.batch_bytes}: at most {MESSAGE_BYTES // 2}")
