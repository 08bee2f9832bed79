"""A gateway listens on loopback only, until its clients are authenticated."""

from __future__ import annotations

import pytest

from gateway.options import Options, is_loopback
from pixiu.errors import ConfigurationError


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gateway.example"])
@pytest.mark.parametrize("key", ["host", "mqtt_host"])
def test_a_listener_beyond_loopback_is_refused(key: str, host: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key} = .*loopback address"):
        Options(**{key: host, "advertised_host": "10.0.0.7"}).validate()  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_is_allowed(host: str) -> None:
    assert is_loopback(host)
    Options(host=host, mqtt_host=host).validate()


def test_many_clients_are_moved_at_a_rate_but_within_the_time_for_draining() -> None:
    options = Options(drain_jitter_s=2.0, drain_clients_per_s=1000, drain_timeout_s=30.0)
    assert [options.drain_spread_s(clients) for clients in (0, 10, 1000, 10_000, 100_000)] == [2.0, 2.0, 2.0, 20.0, 24.0]
    assert Options(drain_jitter_s=60.0).drain_spread_s(100_000) == 60.0
    assert Options(drain_clients_per_s=0).drain_spread_s(100_000) == 2.0
