"""Options of a replay: speed, shares and limits."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pixiu.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of a replay. `validate()` names the option at fault.

    Source: docs/operations.md; docs/promises.md, "Failure rules" 2 (a limit on everything).
    """

    speed: float = 1.0
    """Factor by which log time passes faster."""
    grpc_share: float = 0.1
    """Share of the users that subscribe by gRPC; the others use MQTT."""
    sdk_share: float = 0.5
    """Share of the pairs of sender and room whose messages are published through the SDK; the others by MQTT."""
    settle_s: float = 5.0
    """Seconds without a delivery after which the replay ends while deliveries are missing."""
    linger_s: float = 1.0
    """Seconds after the last owed delivery in which repeated and alien ones are still counted."""
    max_open_messages: int = 1_000
    """Limit of messages under way at a time; the next one waits."""
    max_open_deliveries: int = 20_000
    """Limit of owed deliveries under way at a time; the next message waits."""
    overdue_s: float = 5.0
    """Seconds after which an incomplete message is no longer waited for; later deliveries still count."""
    join_timeout_s: float = 30.0
    """Seconds after which a login that is not confirmed has failed, retries included."""
    login_slots: int = 64
    """Limit of connections that are opened at a time."""

    def validate(self) -> None:
        """Check all options. Raises `ConfigurationError` that names the option at fault."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_share"):
                if not 0 <= value <= 1:
                    raise ConfigurationError(f"replay option {field.name} = {value}: must be from 0 to 1")
            elif not value > 0:
                raise ConfigurationError(f"replay option {field.name} = {value}: must be above 0")
