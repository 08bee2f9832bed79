"""Routes: which messages of clients go to a durable topic, and which durable topics clients get. Pure but for `read_routes`.

    [reports]                       stored, not delivered
    filter = "reports/#"
    topic = "reports"

    [chat]                          stored, and delivered in the order of the log
    filter = "chat/#"
    topic = "chat"
    clients = "chat"

    [news]                          a back end writes the topic, clients get it
    clients = "news"

    [sensors]                       stored in one topic, delivered from another one; a program is between
    filter = "sensors/#"
    topic = "sensors-raw"
    clients = "sensors-clean"

The first route that takes a message decides. Clients get a message from the durable topic alone: whoever carried it to the log, the
log's order is everybody's.

Source: docs/routes.md; Zhihu's gateway (routes and subscriptions are configured apart).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from cluster.routes.carried import OWN_PREFIX
from cluster.routes.templates import HEADER, LEVEL, FieldText
from cluster.settings.fields import show
from cluster.settings.options import Options, Sources, read_tables
from pixiu.discovery.topics import check_name
from pixiu.errors import ConfigurationError, InvalidArgument
from pixiu.ids import MAX_ROOM, TOPIC_ROOM
from pixiu.placement.filter_tree import FilterTree
from pixiu.placement.slots import slot_of
from pixiu.placement.topic_rooms import EVERY_TOPIC, TopicRooms
from pixiu.placement.topics import ROOM_PREFIX, Filter, TopicRefusal, parse_filter, resolve
from pixiu.wire.block import MAX_TAG_BYTES

MAX_ROUTES: Final = 64
"""Routes of a file: each is a label of metrics."""
MAX_NAME: Final = 64
NAME_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
MAX_HOPS: Final = 8
"""Routes that a message may take one after the other. Policy: it is refused at the next one, counted and logged."""
MAX_ROOM_RANGES: Final = 1000
KEY_FIELDS: Final = ("topic", LEVEL, HEADER)
TO_FIELDS: Final = ("key", HEADER)


@dataclass(frozen=True, kw_only=True)
class RouteOptions(Options):
    """A table of the file of routes."""

    filter: str = ""
    """Filter of MQTT topics whose messages are stored, such as "telemetry/#"; as the cluster names them, with a tenant's prefix."""
    rooms: tuple[str, ...] = ()
    """Rooms whose messages are stored, by number: "42", "1000-1999". Beside a filter, or instead of one."""
    topic: str = ""
    """The durable topic that stores them; it must be there."""
    key: str = "{topic}"
    """Key in the durable topic, which keeps the order of each key: fields {topic}, {level:N}, {header:NAME}. Empty: no key, and no
    order."""
    tag: str = ""
    """Tag of the stored messages. Empty: none."""
    headers: tuple[str, ...] = ()
    """Headers of the stored messages, NAME=VALUE, beside those that they have."""
    clients: str = ""
    """The durable topic that clients get; processes of bridges deliver it. Empty: they get nothing of this route."""
    to: str = ""
    """MQTT topic, room/N or template with {key} and {header:NAME} to which it is delivered. Empty: the topic where it was
    published, else its key."""
    from_end: bool = False
    """True: clients get only what is stored after the delivery was begun for the first time."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        takes = bool(self.filter or self.rooms)
        if takes != bool(self.topic):
            yield ("topic", "the durable topic that stores what the filter takes") if takes else (
                "filter", "a filter, or rooms, whose messages the topic stores; without them only `clients` is given"
            )  # fmt: skip
        elif not takes and not self.clients:
            yield "topic", "given with a filter or rooms, or `clients` is given"
        if self.filter and (why := _why_no_filter(self.filter)):
            yield "filter", why
        for name in ("topic", "clients"):
            if value := getattr(self, name):
                yield from _tried(name, lambda value=value: check_name(value, "durable topic"))
        if self.rooms and _ranges(self.rooms) is None:
            yield "rooms", f'a list of at most {MAX_ROOM_RANGES} numbers and ranges such as "42" and "1000-1999"'
        if self.key:
            yield from _tried("key", lambda: FieldText(self.key, KEY_FIELDS))
        if len(self.tag.encode()) > MAX_TAG_BYTES:
            yield "tag", f"a text of at most {MAX_TAG_BYTES} bytes"
        if any(not each.partition("=")[0] or "=" not in each or each.startswith(OWN_PREFIX) for each in self.headers):
            yield "headers", f"a list of NAME=VALUE; names that begin with {OWN_PREFIX} are the cluster's"
        if self.to:
            yield from _tried("to", lambda: check_reachable(FieldText(self.to, TO_FIELDS)))
            if not self.clients:
                yield "to", "given with `clients` only"


def check_reachable(to: FieldText) -> None:
    """Raise `InvalidArgument` if clients can get nothing that is delivered to a template's texts."""
    name = to.example()
    if isinstance(room := resolve(name), TopicRefusal):
        raise InvalidArgument(f"a topic or room/N that clients can have; {name[:80]!r} is none: {room.value}")


def _tried(key: str, check: Any) -> Iterator[tuple[str, str]]:
    try:
        check()
    except InvalidArgument as error:
        yield key, str(error)


def _why_no_filter(text: str) -> str:
    found = parse_filter(text)
    if text.startswith(ROOM_PREFIX):
        return 'a filter of free topics; rooms are named by rooms = ["42"]'
    if not isinstance(found, Filter):
        return f"a filter of free topics: {found.value}"
    if found.group or text[0] == "$" or text.startswith("user/"):
        return "a filter of free topics, not of $…, shared subscriptions or users"
    return ""


def _ranges(texts: Sequence[str]) -> list[tuple[int, int]] | None:
    found = list[tuple[int, int]]()
    for text in texts:
        low, dash, high = text.partition("-")
        high = high if dash else low
        if not all(each.isascii() and each.isdecimal() and len(each) <= 19 for each in (low, high)):
            return None
        if not 0 < int(low) <= int(high) <= MAX_ROOM:
            return None
        found.append((int(low), int(high)))
    return found if len(found) <= MAX_ROOM_RANGES else None


@dataclass(frozen=True)
class Route:
    """A route of the file."""

    name: str
    options: RouteOptions

    @cached_property
    def case(self) -> str:
        """The one of the four cases that it is, in words."""
        found = self.options
        if not found.topic:
            return f"clients get {found.clients}"
        if not found.clients:
            return "stored, not delivered"
        return (
            "stored, and delivered in the log's order" if found.clients == found.topic else f"stored; clients get {found.clients}"
        )

    @cached_property
    def key(self) -> FieldText | None:
        """Template of the key in the durable topic."""
        return FieldText(self.options.key, KEY_FIELDS) if self.options.key else None

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """Its rooms."""
        return _ranges(self.options.rooms) or []

    @cached_property
    def headers(self) -> dict[str, bytes]:
        """Headers that it adds."""
        pairs = (each.partition("=") for each in self.options.headers)
        return {name: value.encode() for name, _, value in pairs}

    @cached_property
    def delivers(self) -> str:
        """Filter of the MQTT topics that it may deliver to; empty: not known."""
        found = self.options
        if found.to:
            return FieldText(found.to, TO_FIELDS).pattern()
        return found.filter if found.topic else ""

    def key_of(self, name: str, headers: Mapping[str, str]) -> bytes | None:
        """Key of a message of a topic, in the durable topic; None: it has none."""
        if self.key is None:
            return None

        def value(field: str) -> str:
            if field == "topic":
                return name
            if field.startswith(LEVEL):
                return level_of(name, int(field.removeprefix(LEVEL)))
            return headers.get(field.removeprefix(HEADER), "")

        return self.key.fill(value).encode()


def level_of(name: str, number: int) -> str:
    """A level of a topic, from 1; empty: it has none."""
    levels = name.split("/")
    return levels[number - 1] if number <= len(levels) else ""


@dataclass(frozen=True)
class Delivery:
    """A durable topic that clients get."""

    topic: str
    routes: tuple[str, ...]
    """Routes that say so: none of them takes what is delivered."""
    to: str = ""
    stored: bool = False
    """True if routes write this topic, so that a message in it is a client's own."""
    from_end: bool = False


@dataclass(frozen=True)
class Taken:
    """A message and the route that takes it, for people."""

    route: Route
    key: bytes | None

    @property
    def slot(self) -> int | None:
        """Slot of the key; None: any."""
        return None if self.key is None else slot_of(self.key)


class Routes:
    """All routes, in the order of the file."""

    def __init__(self, routes: Sequence[Route] = ()) -> None:
        self.routes = tuple(routes)
        self.by_name = {each.name: each for each in routes}
        self._tree: FilterTree[int] = FilterTree()
        for number, each in reversed(list(enumerate(routes))):
            if each.options.filter:
                self._tree.put(each.options.filter.encode(), number)  # the first of equal filters stays
        self._by_room = [(low, high, number) for number, each in enumerate(routes) for low, high in each.ranges]

    def __bool__(self) -> bool:
        return bool(self.routes)

    def of(self, name: str) -> Route | None:
        """The route that takes the messages of a topic, or of room/N."""
        room = room_number(name)
        if room:
            return self.of_room(room)
        found = self._tree.match(name.encode())
        return self.routes[min(found)] if found else None

    def of_room(self, room: int) -> Route | None:
        """The route that takes a room's messages."""
        numbers = [number for low, high, number in self._by_room if low <= room <= high]
        return self.routes[min(numbers)] if numbers else None

    def rooms(self, topic_rooms: TopicRooms) -> RoutedRoomSet:
        """The rooms that may carry messages of routes."""
        return RoutedRoomSet(self, topic_rooms)

    @property
    def deliveries(self) -> list[Delivery]:
        """The durable topics that clients get, each once."""
        found = dict[str, list[Route]]()
        for each in self.routes:
            if each.options.clients:
                found.setdefault(each.options.clients, []).append(each)
        written = {each.options.topic for each in self.routes}
        return [
            Delivery(
                topic, tuple(each.name for each in routes), routes[0].options.to, topic in written, routes[0].options.from_end
            )
            for topic, routes in found.items()
        ]  # fmt: skip

    def test(self, name: str, headers: Mapping[str, str] | None = None) -> Taken | None:
        """Find the route that takes a message of a topic, and its key."""
        route = self.of(name)
        return None if route is None else Taken(route, route.key_of(name, headers or {}))


class RoutedRoomSet:
    """The rooms that may carry messages of routes: a superset, so that only these are looked at message by message."""

    def __init__(self, routes: Routes, topic_rooms: TopicRooms) -> None:
        self._ranges = [each for route in routes.routes for each in route.ranges]
        found = {room for each in routes.routes if each.options.filter for room in topic_rooms.rooms(each.options.filter)}
        self._all = not found.isdisjoint(EVERY_TOPIC)
        self._rooms = frozenset(found)

    def __contains__(self, room: int) -> bool:
        if room >= TOPIC_ROOM:
            return self._all or room in self._rooms
        return any(low <= room <= high for low, high in self._ranges)


def room_number(name: str) -> int:
    """N of room/N; 0: it is another name."""
    digits = name.removeprefix(ROOM_PREFIX)
    return int(digits) if digits != name and digits.isascii() and digits.isdecimal() and len(digits) <= 19 else 0


def read_routes(path: Path | str) -> Routes:
    """Read and check the file of routes. Raises `ConfigurationError` with a line for each error."""
    return routes_of(read_tables(path, "the file of routes"), str(path))


def routes_of(tables: Mapping[str, Any], origin: str) -> Routes:
    """Routes of the file's tables. Raises `ConfigurationError`."""
    found, wrong = list[Route](), list[str]()
    if len(tables) > MAX_ROUTES:
        wrong.append(f"{origin}: these are {len(tables)} routes; at most {MAX_ROUTES} are allowed")
    for name, table in tables.items():
        if not 0 < len(name) <= MAX_NAME or not NAME_CHARACTERS.issuperset(name):
            wrong.append(f"{origin}: [{show(name)}]: the name of a route is 1 to {MAX_NAME} of A-Z a-z 0-9 . _ -")
        elif not isinstance(table, dict):
            wrong.append(f"{origin}: {name} = {show(table)}: must be a table, [{name}]")
        else:
            sources = Sources(name, RouteOptions)
            for key, raw in table.items():
                sources.put(key, raw, origin, text=False)
            options = sources.build()
            wrong += sources.wrong
            if options is not None:
                found.append(Route(name, options))
    wrong = wrong or [f"{origin}: {each}" for each in contradictions(found)]
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    return Routes(found)


def contradictions(routes: Sequence[Route]) -> Iterator[str]:
    """Sentences on routes that cannot be together."""
    for number, route in enumerate(routes):
        filter_ = route.options.filter
        before = [each for each in routes[:number] if each.options.filter and filter_ and covers(each.options.filter, filter_)]
        if before:
            yield (
                f"[{route.name}] takes nothing by filter = {filter_}: [{before[0].name}] stands before it and takes all of it; "
                "put the narrower filter first"
            )
    by_clients = dict[str, list[Route]]()
    for each in routes:
        if each.options.clients:
            by_clients.setdefault(each.options.clients, []).append(each)
    for topic, group in by_clients.items():
        for each in group[1:]:
            if (each.options.to, each.options.from_end) != (group[0].options.to, group[0].options.from_end):
                both = f"[{each.name}] and [{group[0].name}]"
                yield f"{both} deliver the durable topic {topic}: give both the same `to` and `from_end`"
        for each in routes:
            if each.options.topic == topic and each.options.clients != topic:
                yield (
                    f"[{each.name}] stores in {topic}, which [{group[0].name}] delivers to clients: give [{each.name}] "
                    f'clients = "{topic}", or another durable topic'
                )
    yield from loops(routes)


def loops(routes: Sequence[Route]) -> Iterator[str]:
    """Sentences on circles of routes: what one delivers another one takes, and so on, back to the first."""
    follows = dict[str, list[str]]()
    for each in routes:
        own = {other.name for other in routes if other.options.clients == each.options.clients}
        follows[each.name] = [
            other.name
            for other in routes
            if each.options.clients and each.delivers and other.name not in own and other.options.filter and other.options.clients
            and overlap(each.delivers, other.options.filter)
            and not _is_taken_before(each.delivers, other, routes)
        ]  # fmt: skip
    said = set[frozenset[str]]()
    for name in follows:
        path = _path_back(name, follows)
        if path and frozenset(path) not in said:
            said.add(frozenset(path))
            shown = " → ".join(f"[{each}]" for each in (*path, name))
            yield (
                f"the routes {shown} form a loop: each takes what the one before it delivers; give one of them another `to` or "
                "filter"
            )


def _is_taken_before(delivered: str, route: Route, routes: Sequence[Route]) -> bool:
    """True if a route that stands before this one takes all that is delivered."""
    for each in routes:
        if each is route:
            return False
        if each.options.filter and covers(each.options.filter, delivered):
            return True
    return False


def _path_back(name: str, follows: Mapping[str, Sequence[str]]) -> list[str]:
    """The shortest way from a route back to it; empty: there is none."""
    ways, seen = [[name]], set[str]()
    while ways:
        way = ways.pop(0)
        for each in follows[way[-1]]:
            if each == name:
                return way
            if each not in seen:
                seen.add(each)
                ways.append([*way, each])
    return []


def covers(wide: str, narrow: str) -> bool:
    """True if a filter matches every topic that another one matches."""
    left, right = wide.split("/"), narrow.split("/")
    for index, level in enumerate(left):
        if level == "#":
            return not (index == 0 and narrow.startswith("$"))
        if index >= len(right) or right[index] == "#" or (level != "+" and level != right[index]):
            return False
    return len(left) == len(right)


def overlap(one: str, other: str) -> bool:
    """True if two filters may match a topic in common."""
    left, right = one.split("/"), other.split("/")
    for index in range(max(len(left), len(right))):
        pair = {each[index] if index < len(each) else "" for each in (left, right)}
        if "#" in pair:
            return True
        if index >= min(len(left), len(right)) or (len(pair) == 2 and "+" not in pair):
            return False
    return True
