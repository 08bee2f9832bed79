"""Routes: the file and what is wrong with it, which route takes a message, and what carries it through a durable topic."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cluster.routes.carried import Carried, carried, taken, with_taken
from cluster.routes.live_file import RoutesFile
from cluster.routes.routes import Delivery, Routes, covers, overlap, routes_of
from cluster.trust.audit import Audit
from pixiu.errors import ConfigurationError
from pixiu.ids import topic_room
from pixiu.placement.slots import slot_of
from pixiu.placement.topic_rooms import BY_FIRST_LEVEL, TopicRooms

CASES = """
    [reports]
    filter = "reports/#"
    topic = "reports"
    [chat]
    filter = "chat/#"
    rooms = ["42", "1000-1999"]
    topic = "chat"
    clients = "chat"
    key = "{level:2}"
    [news]
    clients = "news"
    to = "news/{key}"
    [sensors]
    filter = "sensors/+/heat"
    topic = "sensors-raw"
    clients = "sensors-clean"
"""


def routes(text: str) -> Routes:
    return routes_of(tomllib.loads(text), "routes.toml")


def wrong(text: str) -> str:
    with pytest.raises(ConfigurationError) as found:
        routes(text)
    return str(found.value)


def test_the_first_route_that_takes_a_topic_or_room_decides() -> None:
    found = routes(CASES)
    names = {
        "reports/eu/7": "reports", "reports": "reports", "chat/7": "chat", "room/42": "chat", "room/1999": "chat",
        "sensors/7/heat": "sensors", "sensors/7/light": "", "room/43": "", "news/7": "",
    }  # fmt: skip
    assert {name: route.name if (route := found.of(name)) else "" for name in names} == names
    assert [each.case for each in found.routes] == [
        "stored, not delivered", "stored, and delivered in the log's order", "clients get news",
        "stored; clients get sensors-clean",
    ]  # fmt: skip
    both = routes('[narrow]\nfilter = "a/b"\ntopic = "one"\n[wide]\nfilter = "a/#"\ntopic = "two"')
    assert [both.of(name).name for name in ("a/b", "a/c")] == ["narrow", "wide"]  # type: ignore[union-attr]


def test_a_key_follows_from_the_topic_and_names_the_slot() -> None:
    found = routes(CASES)
    test = found.test("reports/eu/7")
    assert test is not None
    assert (test.key, test.slot) == (b"reports/eu/7", slot_of(b"reports/eu/7"))
    test = found.test("chat/7/x")
    assert test is not None
    assert test.key == b"7"
    (by_header,) = routes('[a]\nfilter = "a/#"\ntopic = "a"\nkey = "{header:shop}/{level:9}"').routes
    assert by_header.key_of("a/b", {"shop": "s"}) == b"s/"
    (without,) = routes('[a]\nfilter = "a/#"\ntopic = "a"\nkey = ""').routes
    assert without.key_of("a/b", {}) is None


def test_each_durable_topic_is_delivered_once_and_by_none_of_the_routes_that_deliver_it() -> None:
    two = CASES + '[talk]\nfilter = "talk/#"\ntopic = "chat"\nclients = "chat"'
    assert routes(two).deliveries == [
        Delivery("chat", ("chat", "talk"), stored=True), Delivery("news", ("news",), "news/{key}"),
        Delivery("sensors-clean", ("sensors",)),
    ]  # fmt: skip


def test_rooms_that_no_route_takes_are_not_looked_at() -> None:
    rooms = routes(CASES).rooms(BY_FIRST_LEVEL)
    assert topic_room("reports/1") in rooms
    assert topic_room("chat") in rooms
    assert 42 in rooms
    assert 1500 in rooms
    assert topic_room("other/1") not in rooms
    assert 43 not in rooms
    spread = TopicRooms("sensors=2")
    assert spread.room("sensors/7/heat") in routes(CASES).rooms(spread)
    assert topic_room("anything") in routes('[a]\nfilter = "+/x"\ntopic = "a"').rooms(BY_FIRST_LEVEL)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[a]\nfilter = "a/#"', "topic"),
        ('[a]\ntopic = "a"', "filter"),
        ("[a]", "or `clients` is given"),
        ('[a]\nfilter = "a#"\ntopic = "a"', "stand alone in their level"),
        ('[a]\nfilter = "room/7"\ntopic = "a"', 'rooms = ["42"]'),
        ('[a]\nfilter = "$share/g/a"\ntopic = "a"', "not of $…, shared"),
        ('[a]\nrooms = ["0-7"]\ntopic = "a"', '"1000-1999"'),
        ('[a]\nfilter = "a"\ntopic = "a b"', "the name of a durable topic"),
        ('[a]\nfilter = "a"\ntopic = "a"\nkey = "{colour}"', "fields {topic}, {level:N}, {header:NAME}"),
        ('[a]\nfilter = "a"\ntopic = "a"\nheaders = ["pixiu-routes=x"]', "are the cluster's"),
        ('[a]\nfilter = "a"\ntopic = "a"\nto = "b"', "given with `clients` only"),
        ('[a]\nclients = "t"\nto = "x/#"', "clients can have; 'x/#' is none"),
        ('[a]\nclients = "t"\nto = "room/x{key}"', "clients can have; 'room/x1' is none"),
        ('[a]\nfilter = "a"\ntopics = "a"', "Did you mean topic?"),
        ("a = 1", "must be a table, [a]"),
        ('["a b"]\ntopic = "a"', "the name of a route"),
        ("\n".join(f'[r{n}]\nclients = "t{n}"' for n in range(65)), "at most 64"),
        (
            '[a]\nfilter = "a/#"\ntopic = "a"\n[b]\nfilter = "a/+/c"\ntopic = "b"',
            "[b] takes nothing by filter = a/+/c: [a] stands before",
        ),
        ('[a]\nfilter = "a/#"\ntopic = "t"\nclients = "t"\n[b]\nfilter = "b/#"\ntopic = "t"', 'give [b] clients = "t"'),
        ('[a]\nclients = "t"\nto = "x"\n[b]\nclients = "t"\nto = "y"', "give both the same `to`"),
        (
            '[p]\nfilter = "a/#"\ntopic = "A"\nclients = "A"\nto = "b/{key}"\n'
            '[q]\nfilter = "b/#"\ntopic = "B"\nclients = "B"\nto = "a/x"',
            "[p] → [q] → [p] form a loop",
        ),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_a_sentence_that_says_what_to_do(text: str, said: str) -> None:
    assert said in wrong(text)


def test_what_stays_in_its_own_topics_is_no_loop() -> None:
    chain = '[p]\nfilter = "a/#"\ntopic = "A"\nclients = "A"\nto = "b/{key}"\n[q]\nfilter = "b/#"\ntopic = "B"\nclients = "B"'
    assert len(routes(chain).routes) == 2


def test_filters_cover_and_overlap() -> None:
    assert covers("a/#", "a/+/c")
    assert covers("+/b", "a/b")
    assert covers("#", "a/#")
    assert covers("a/#", "a")
    assert not covers("a/+", "a/#")
    assert not covers("a/b", "a/+")
    assert not covers("#", "$SYS/x")
    assert not covers("a/b/c", "a/b")
    assert overlap("a/+", "+/b")
    assert overlap("a/#", "a/b/c")
    assert not overlap("a/b", "a/c")
    assert not overlap("a", "a/b")


def test_what_a_durable_topic_has_no_field_for_is_carried_and_a_damaged_header_counts_as_none() -> None:
    message = Carried(0x1234, 7, 65, 0x90, 5)
    assert carried({"pixiu-message": message.encode()}) == message
    for damaged in (b"", b"1.2.3", b"1.2.3.4.x", b"1.2.3.4.99999999", b"1" * 65, b"-1.0.0.0.0"):
        assert carried({"pixiu-message": damaged}) == Carried()
    assert taken(with_taken(("a", "b"), ("b", "c"))) == ("a", "b", "c")
    assert taken("") == ()
    assert taken("a," * 1000) == ()


def test_a_changed_file_is_taken_once_it_stands_still_audited_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    path, got, audit = tmp_path / "routes.toml", list[Routes](), Audit(tmp_path / "audit")
    path.write_text('[a]\nfilter = "a/#"\ntopic = "a"')
    with capture_logs() as logs:
        import structlog

        file = RoutesFile(str(path), got.append, structlog.get_logger(), audit)
        file.check()
        assert not got
        assert len(file.routes.routes) == 1
        path.write_text('[a]\nfilter = "a/#"\ntopic = "a"\n[bb]\nclients = "news"')
        file.check()
        assert not got, "it may be written again"
        file.check()
        assert [len(each.routes) for each in got] == [2]
        path.write_text("[a")
        file.check()
        file.check()
        assert len(got) == 1
        assert len(file.routes.routes) == 2
        assert "before the last change are in use" in file.problem
    assert [each["event"] for each in logs] == ["routes_read", "routes_wrong"]
    audit.close()
    (line,) = [each for file_ in (tmp_path / "audit").iterdir() for each in file_.read_text().splitlines() if "routes_read" in each]
    assert "bb:  clients get news" in line
    assert "a: a/# stored, not delivered" in line
    with pytest.raises(ConfigurationError):
        RoutesFile(str(path), got.append, structlog.get_logger())
