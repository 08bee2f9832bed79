"""How a log is replayed: speed, shares and bounds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pixiu.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What a replay can be told. `validate()` names the option at fault.

    Source: docs/operations.md; docs/promises.md, "Failure rules" 2 (a limit on everything).
    """

    speed: float = 1.0
    """Log time passes so many times faster."""
    grpc_share: float = 0.1
    """Share of the users that subscribe by gRPC; the others use MQTT."""
    sdk_share: float = 0.5
    """Share of the pairs of sender and room whose messages are published through the SDK; the others by MQTT."""
    settle_s: float = 5.0
    """The replay ends when nothing came for so many seconds, if deliveries are missing then."""
    linger_s: float = 1.0
    """Seconds after the last owed delivery in which repeated and alien ones are still counted."""
    max_open_messages: int = 1_000
    """Messages on their way at one time; the next one waits."""
    max_open_deliveries: int = 20_000
    """Owed deliveries on their way at one time; the next message waits."""
    overdue_s: float = 5.0
    """A message that is not complete after so many seconds is no longer waited for; what comes later still counts."""
    join_timeout_s: float = 30.0
    """A login that is not confirmed after so many seconds, retries included, has failed."""
    login_slots: int = 64
    """Connections that are opened at one time."""

    def validate(self) -> None:
        """Raises `ConfigurationError` that names the option at fault."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_share"):
                if not 0 <= value <= 1:
                    raise ConfigurationError(f"replay option {field.name} = {value}: must be from 0 to 1")
            elif not value > 0:
                raise ConfigurationError(f"replay option {field.name} = {value}: must be above 0")
