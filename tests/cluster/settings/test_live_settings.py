"""Settings that change while all runs: what may be set, what a process makes of it, and what is refused in which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.settings.live_settings import LIVE, Effective, Settings, changed, effective, live_names, spec_of, value_of
from cluster.settings.options import ClusterOptions
from ops.config_command import options_types
from pixiu.errors import InvalidArgument, MalformedData
from proxy.options import Options as Proxy

TYPES = options_types()


def of(**values: object) -> Settings:
    return Settings(3, {name.replace("__", "."): value for name, value in values.items()})


def proxy(settings: Settings) -> Effective:
    return effective("proxy", ClusterOptions(), Proxy(room_messages_per_s=7), settings)


def test_everything_that_may_be_set_is_an_option_of_its_table() -> None:
    assert set(LIVE) == set(TYPES)
    for name in live_names():
        assert spec_of(name, TYPES).key == name.partition(".")[2]


def test_the_operators_page_lists_them() -> None:
    page = (
        (Path(__file__).parents[3] / "docs/operations.md")
        .read_text()
        .partition("| table | settings that change while all runs |")[2]
    )
    rows = [line.split("|")[1:3] for line in page.partition("\n\n")[0].splitlines()[2:]]
    listed = {table.split("`")[1]: set(re.findall(r"`(\w+)`", settings)) for table, settings in rows}
    assert listed == {table: set(keys) for table, keys in LIVE.items() if keys}


def test_what_is_set_goes_over_the_configuration_and_a_role_over_all_roles() -> None:
    found = proxy(of(proxy__room_messages_per_s=100, all__log_level="debug", proxy__log_level="error", broker__log_level="info"))
    assert isinstance(found.options, Proxy)
    assert (found.options.room_messages_per_s, found.options.log_level) == (100, "error")
    assert found.taken == {"proxy.room_messages_per_s": 100, "all.log_level": "debug", "proxy.log_level": "error"}
    assert found.refused == {}
    assert proxy(of(cluster__trace_fraction=0.5)).cluster.trace_fraction == 0.5
    assert proxy(Settings()).options == Proxy(room_messages_per_s=7), "as configured"


def test_who_changed_them_last_is_told_and_a_release_that_did_not_say_is_read() -> None:
    made = Settings(3, {"all.log_level": "debug"}, "ann@desk")
    assert Settings.from_json(made.to_json()) == made
    assert Settings.from_json(b'{"version": 3, "settings": {"all.log_level": "debug"}}') == Settings(3, made.values)


def test_a_process_leaves_out_what_it_does_not_know_or_what_cannot_be() -> None:
    found = proxy(of(proxy__newer=1, proxy__limit_burst_s="x", cluster__mtu_bytes=9, proxy__room_bytes_per_s=5, gateway__newer=1))
    assert found.taken == {"proxy.room_bytes_per_s": 5}
    assert set(found.refused) == {"proxy.newer", "proxy.limit_burst_s", "cluster.mtu_bytes"}
    assert found.refused["proxy.limit_burst_s"] == "must be a number from 0.01 to 60.0"


def test_the_registrys_node_is_read_as_it_was_written_and_refused_when_it_cannot_be() -> None:
    settings = of(all__log_level="debug")
    assert Settings.from_json(settings.to_json()) == settings
    for data in (b"", b"[]", b"{}", b'{"version": 1}', b'{"version": -1, "settings": {}}', b'{"version": 1, "settings": []}'):
        with pytest.raises(MalformedData):
            Settings.from_json(data)
    assert changed({"a": 1, "b": 2}, {"b": 3, "c": 4}) == {"a": None, "b": 3, "c": 4}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("proxy.room_mesages_per_s", "5", "Did you mean proxy.room_messages_per_s"),
        ("prxy.room_messages_per_s", "5", "Did you mean proxy.room_messages_per_s"),
        ("room_messages_per_s", "5", "a setting of proxy, gateway: name one, as in proxy.room_messages_per_s"),
        ("cluster.mtu_bytes", "5", "is read only when a process starts"),
        ("broker.partition", "5", "of broker may change at run time: log_level"),
        ("all.log_level", "loud", 'all.log_level = "loud": must be one of: debug, info'),
        ("proxy.room_messages_per_s", "-1", "must be an integer from 0"),
        ("cluster.trace_fraction", "1.5", "must be a number from 0.0 to 1.0"),
        ("", "5", "there is no setting"),
        (".", "5", "there is no setting"),
    ],
)
def test_what_may_not_be_set_is_refused_in_words(name: str, text: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as found:
        value_of(name, text, TYPES)
    assert said in str(found.value)
