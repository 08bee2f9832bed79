"""A gateway's listeners beyond loopback, and how fast it moves its clients."""

from __future__ import annotations

import pytest

from gateway.options import Options
from pixiu.errors import ConfigurationError

FLAGS = {"client_host": "clients_insecure", "mqtt_host": "mqtt_insecure"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gateway.example"])
@pytest.mark.parametrize("key", FLAGS)
def test_a_listener_beyond_loopback_opens_only_by_its_name(key: str, host: str) -> None:
    flag, other = FLAGS[key], next(flag for name, flag in FLAGS.items() if name != key)
    where = {key: host, "advertised_client_host": "10.0.0.7"}
    for wrong in ({}, {other: True}):
        with pytest.raises(ConfigurationError, match=f"^{key} = .*loopback address.*{flag} = true"):
            Options(**where, **wrong).validate()  # type: ignore[arg-type]
    options = Options(**where, **{flag: True})  # type: ignore[arg-type]
    options.validate()
    assert options.insecure_listeners() == [f"{flag} = true: everybody who reaches {key} = {host} can act as any client"]


PLAIN = {"client_host": "clients_plain", "mqtt_host": "mqtt_plain"}


@pytest.mark.parametrize("key", PLAIN)
def test_logins_go_beyond_loopback_by_tls_or_where_it_is_said_that_they_need_not(key: str) -> None:
    where: dict[str, object] = {key: "10.0.0.7", "access_file": "access.toml"}
    flag, other = PLAIN[key], next(flag for name, flag in PLAIN.items() if name != key)
    for wrong in ({}, {other: True}):
        with pytest.raises(ConfigurationError, match=f"^{key} = .*read on the way.*tls_certificate.*{flag} = true"):
            Options(**where, **wrong).validate()  # type: ignore[arg-type]
    plain = Options(**where, **{flag: True})  # type: ignore[arg-type]
    plain.validate()
    assert plain.insecure_listeners() == [f"{flag} = true: logins and messages at {key} = 10.0.0.7 can be read on the way"]
    encrypted = Options(**where, tls_certificate="listener.pem")  # type: ignore[arg-type]
    encrypted.validate()
    assert encrypted.insecure_listeners() == []


def test_tls_asks_nobody_who_he_is() -> None:
    with pytest.raises(ConfigurationError, match=r"asks nobody for a login.*clients_insecure = true"):
        Options(client_host="10.0.0.7", tls_certificate="listener.pem").validate()


def test_a_port_without_tls_beside_the_other_is_named_too() -> None:
    outside = {"mqtt_host": "10.0.0.7", "access_file": "access.toml", "tls_certificate": "listener.pem", "mqtt_plain_port": 1883}
    with pytest.raises(ConfigurationError, match=r"mqtt_host = .*mqtt_plain = true"):
        Options(**outside).validate()  # type: ignore[arg-type]
    named = Options(**outside, mqtt_plain=True)  # type: ignore[arg-type]
    named.validate()
    assert len(named.insecure_listeners()) == 1
    Options(**{**outside, "mqtt_host": "127.0.0.1"}).validate()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"tls_key": "listener.key"}, "tls_key"),
        ({"client_ca": "ca.pem"}, "client_ca"),
        ({"client_certificate_required": True, "tls_certificate": "listener.pem"}, "client_certificate_required"),
        ({"mqtt_plain_port": 1883}, "mqtt_plain_port"),
        ({"mqtt_plain_port": 1883, "mqtt_port": 1883, "tls_certificate": "listener.pem"}, "mqtt_plain_port"),
    ],
)
def test_options_of_tls_that_do_nothing_are_refused(wrong: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{key} = "):
        Options(**wrong).validate()  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_is_allowed_and_nobody_is_warned_of_it(host: str) -> None:
    options = Options(client_host=host, mqtt_host=host, mqtt_insecure=True)
    options.validate()
    assert options.insecure_listeners() == []


def test_processes_of_the_cluster_may_come_from_other_machines() -> None:
    Options(host="10.0.0.7", client_host="127.0.0.1").validate()
    with pytest.raises(ConfigurationError, match=r"client_host = .*loopback address"):
        Options(host="10.0.0.7").validate()


def test_many_clients_are_moved_at_a_rate_but_within_the_time_for_draining() -> None:
    options = Options(drain_jitter_s=2.0, drain_clients_per_s=1000, drain_timeout_s=30.0)
    assert [options.drain_spread_s(clients) for clients in (0, 10, 1000, 10_000, 100_000)] == [2.0, 2.0, 2.0, 20.0, 24.0]
    assert Options(drain_jitter_s=60.0).drain_spread_s(100_000) == 60.0
    assert Options(drain_clients_per_s=0).drain_spread_s(100_000) == 2.0
