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
