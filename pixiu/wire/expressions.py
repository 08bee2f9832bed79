"""Expressions of channels' filters: checked once, then closures that look at one message each. Pure.

    text ──cel.parse──▶ tree ──types, columns of mistakes──▶ closures              when the channel is made
    block ──bytes of which one must be there──▶ some messages ──closures──▶ those that match

There are no loops, so a message costs at most `cel.MAX_NODES` steps, each at most linear in the text that it looks at. What they
look at is counted: the dispatcher ends its turn by that.

A value that is not there, a text that is no number, a division by zero or an overflow is an error. `||` and `&&` pass over an error
if the other side decides; else the message does not match, and is counted.

Why not a library: cel-python takes 300 µs for a comparison of a header; common-expression-language 4 µs and the copies of all
fields, and its macros give an expression of 190 characters a second for each message.

Source: docs/topics.md, "Expressions".
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from pixiu.errors import InvalidArgument
from pixiu.wire import cel, patterns
from pixiu.wire.block import FLAGS_AT, HEADER, INDEX_BYTES, U16, U64, Block, Flag
from pixiu.wire.cel import Node

MAX_MATCHED: Final = 1024
"""Characters of a text that `matches` looks at. Policy: a longer one is an error."""
MAX_REMEMBERED: Final = 4096
"""Texts of which a pattern remembers whether they match. Policy: then it forgets all."""
MAX_NEEDLES: Final = 64
"""Pieces of bytes that a block is searched for. Policy: with more, every message is looked at."""
MAX_NUMBER_TEXT: Final = 64
"""Characters of a text that `int` and `double` read. Policy: a longer one is an error."""
MAX_TEXT: Final = 0xFFFF
"""Characters of a text that `+` makes. Policy: a longer one is an error."""
PAIRS: Final = 1 << 15
"""Characters of a text times those of a piece, up to which the piece is searched in any way."""
LINEAR: Final = 30_000
"""Length from which CPython searches in linear time, whatever the text; below, it may compare each pair."""
MATCH_WORK: Final = 32
"""Work of a pattern for each character, bytes."""
STEP_WORK: Final = 4
"""Work of a step of an expression for each header that it may pass, bytes."""
INT: Final = 1 << 63
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_REAL: Final = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)


class _Failed(Exception):
    """The expression has no value for a message."""


class Fields:
    """The fields of one message that expressions look at."""

    __slots__ = ("event_at_us", "headers", "key", "load_test", "size", "slot", "tag", "work")

    def __init__(self, block: Block, number: int) -> None:
        data, (at, end), index = block.data, block.bounds(number), FLAGS_AT + INDEX_BYTES * number
        flags = data[index]
        self.slot, self.load_test = data[index - 2] | data[index - 1] << 8, bool(flags & Flag.LOAD_TEST)
        self.event_at_us: int | None = None
        self.tag: bytes | None = None
        self.key: bytes | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        if flags & Flag.EVENT_TIME:
            self.event_at_us = int(U64.unpack_from(data, at)[0])
            at += 8
        at += (8 if flags & Flag.DELIVER_AT else 0) + (4 if flags & Flag.EXPIRES else 0)
        if flags & Flag.TAG:
            begin, at = at + 1, at + 1 + data[at]
            self.tag = data[begin:at]
        if flags & Flag.KEY:
            begin, at = at + 2, at + 2 + (data[at] | data[at + 1] << 8)
            self.key = data[begin:at]
        if flags & Flag.HEADERS:
            left, at = data[at], at + 1
            for _ in range(left):
                name, value = HEADER.unpack_from(data, at)
                at += HEADER.size + name
                self.headers.append((data[at - name : at], data[at : at + value]))
                at += value
        self.size = end - at
        self.work = 0
        """Bytes that an expression has looked at."""


Run = Callable[[Fields], Any]
BOOL, NUMBER, REAL, TEXT, TIME, HEADERS = "bool", "int", "double", "string", "timestamp", "headers"
NUMBERS: Final = (NUMBER, REAL)
ORDERED: Final = (NUMBER, REAL, TEXT, TIME)


class Typed(NamedTuple):
    """A checked piece of an expression."""

    type: str
    """A list is "list of " and the type of its elements."""
    run: Run
    node: Node
    parts: tuple[Typed, ...] = ()
    constant: bool = False
    """True if it has the same value for every message."""
    header: bytes = b""
    """The header that it is, if it is one by a fixed name."""


class Expression:
    """A checked expression, as the filter of a channel.

    Args:
        text: in the syntax of `pixiu.wire.cel`.

    Raises InvalidArgument, which says the column.
    """

    def __init__(self, text: str) -> None:
        tree = cel.parse(text)
        found = _Compiler(text).compile(tree)
        if found.type != BOOL:
            raise cel.problem(text, found.node.at, f"an expression is true or false, this one is a {found.type}")
        self._run = found.run
        self.needles: Sequence[bytes] = _needles(found) or ()
        """Bytes of which one is in each message that matches; none: nothing is known in advance."""
        self.errors = 0
        """Messages for which it had no value."""
        self.work = 0
        """Bytes looked at, about; whoever reads it may reset it."""
        self._step_work = STEP_WORK * _size(tree)

    def matching(self, block: Block, low: int, high: int) -> list[int]:
        """The numbers of a block's messages [low, high) that match, rising."""
        numbers = block.having(self.needles, low, high) if self.needles else range(low, high)
        found, run, work = list[int](), self._run, len(self.needles) * block.length(low, high)
        for number in numbers:
            fields = Fields(block, number)
            try:
                if run(fields):
                    found.append(number)
            except _Failed:
                self.errors += 1
            work += fields.work + self._step_work * (1 + len(fields.headers))
        self.work += work
        return found


class _Compiler:
    """Checks the types of a tree and makes closures of it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _fail(self, node: Node, what: str) -> InvalidArgument:
        return cel.problem(self._text, node.at, what)

    def compile(self, node: Node) -> Typed:
        """Compile a tree. Raises InvalidArgument."""
        match node.kind:
            case "const":
                return _constant(node, node.value)
            case "name":
                return self._variable(node)
            case "index":
                return self._header(node)
            case "call":
                return self._has(node) if node.name == "has" else self._call(node)
        parts = tuple(self.compile(part) for part in node.parts)
        match node.kind:
            case "||" | "&&":
                self._all(node, parts, BOOL)
                return Typed(BOOL, _joined([part.run for part in parts], decides=node.kind == "||"), node, parts)
            case "!":
                self._all(node, parts, BOOL)
                run = parts[0].run
                return Typed(BOOL, lambda fields: not run(fields), node, parts)
            case "?":
                return self._choice(node, parts)
            case "list":
                return self._elements(node, parts)
            case "in":
                return self._within(node, *parts)
            case "==" | "!=" | "<" | "<=" | ">" | ">=":
                return self._compared(node, *parts)
        return self._arithmetic(node, parts)

    def _all(self, node: Node, parts: Sequence[Typed], *types: str) -> None:
        for part in parts:
            if part.type not in types:
                raise self._fail(part.node, f"{node.kind} needs a {' or a '.join(types)}, not a {part.type}")

    def _variable(self, node: Node) -> Typed:
        found = _VARIABLES.get(node.name)
        if found is None:
            raise self._fail(node, f"there is no {node.name}; a message has {', '.join(_VARIABLES)}")
        return Typed(found[0], found[1], node)

    def _header(self, node: Node) -> Typed:
        whole, name = (self.compile(part) for part in node.parts)
        if whole.type != HEADERS or name.type != TEXT:
            raise self._fail(node, 'only headers have names: headers["x"], or headers.x')
        if name.constant:
            wanted = str(name.node.value).encode()
            if not 0 < len(wanted) < 256:
                raise self._fail(name.node, f"a header's name has 1 to 255 bytes; this one has {len(wanted)}")
            return Typed(TEXT, lambda fields: _header_of(fields, wanted), node, header=wanted)
        run = name.run
        return Typed(TEXT, lambda fields: _header_of(fields, run(fields).encode()), node, (name,))

    def _has(self, node: Node) -> Typed:
        if len(node.parts) != 1 or node.parts[0].kind not in ("index", "name"):
            raise self._fail(node, "has takes one header, or key, tag or event_time")
        part = self.compile(node.parts[0])
        name, wanted = node.parts[0].name, part.header
        if wanted:
            return Typed(BOOL, lambda fields: any(each == wanted for each, _ in fields.headers), node, (part,))
        if name not in _OPTIONAL:
            raise self._fail(node.parts[0], "has takes one header by a fixed name, or key, tag or event_time")
        get = operator.attrgetter(_OPTIONAL[name])
        return Typed(BOOL, lambda fields: get(fields) is not None, node, (part,))

    def _choice(self, node: Node, parts: Sequence[Typed]) -> Typed:
        condition, yes, no = parts
        if condition.type != BOOL:
            raise self._fail(condition.node, f"before a ? stands a condition, not a {condition.type}")
        if yes.type != no.type:
            raise self._fail(node, f"both sides of the : have one type, not {yes.type} and {no.type}")
        test, then, other = condition.run, yes.run, no.run
        return Typed(yes.type, lambda fields: then(fields) if test(fields) else other(fields), node, tuple(parts))

    def _elements(self, node: Node, parts: Sequence[Typed]) -> Typed:
        types = {part.type for part in parts}
        if len(types) > 1 or types & {HEADERS} or any(each.startswith("list") for each in types):
            raise self._fail(node, "the elements of a list are texts, numbers, times or booleans, all of one type")
        kind = f"list of {next(iter(types), 'nothing')}"
        if all(part.constant for part in parts):
            values = frozenset(part.run(_NOBODY) for part in parts)
            return Typed(kind, lambda _: values, node, tuple(parts), constant=True)
        runs = [part.run for part in parts]
        return Typed(kind, lambda fields: [run(fields) for run in runs], node, tuple(parts))

    def _within(self, node: Node, item: Typed, whole: Typed) -> Typed:
        one, all_ = item.run, whole.run
        if whole.type == HEADERS and item.type == TEXT:

            def there(fields: Fields) -> bool:
                wanted = one(fields).encode()
                return any(name == wanted for name, _ in fields.headers)

            return Typed(BOOL, there, node, (item, whole))
        if whole.type not in ("list of nothing", f"list of {item.type}"):
            raise self._fail(node, f"a {item.type} cannot be in a {whole.type}")
        if whole.constant:
            values = all_(_NOBODY)
            return Typed(BOOL, lambda fields: one(fields) in values, node, (item, whole))
        return Typed(BOOL, lambda fields: one(fields) in all_(fields), node, (item, whole))

    def _compared(self, node: Node, left: Typed, right: Typed) -> Typed:
        same = left.type == right.type or (left.type in NUMBERS and right.type in NUMBERS)
        if not same or left.type not in ((*ORDERED, BOOL) if node.kind in ("==", "!=") else ORDERED):
            raise self._fail(node, f"a {left.type} and a {right.type} cannot be compared by {node.kind}")
        test, one, other = _COMPARE[node.kind], left.run, right.run
        if right.constant:
            value = other(_NOBODY)
            return Typed(BOOL, lambda fields: test(one(fields), value), node, (left, right))
        return Typed(BOOL, lambda fields: test(one(fields), other(fields)), node, (left, right))

    def _arithmetic(self, node: Node, parts: Sequence[Typed]) -> Typed:
        if node.kind == "negative":
            self._all(node._replace(kind="-"), parts, *NUMBERS)
            one = parts[0].run
            return Typed(parts[0].type, lambda fields: _bounded(-one(fields)), node, tuple(parts))
        left, right = parts
        types = (*NUMBERS, TEXT) if node.kind == "+" else (NUMBER,) if node.kind == "%" else NUMBERS
        self._all(node, parts, *types)
        if left.type != right.type:
            raise self._fail(node, f"{node.kind} needs two of one type, not a {left.type} and a {right.type}; see int and double")
        work, one, other = _WORK[node.kind], left.run, right.run
        return Typed(left.type, lambda fields: _bounded(work(one(fields), other(fields))), node, tuple(parts))

    def _call(self, node: Node) -> Typed:
        parts = [self.compile(part) for part in node.parts]
        name = node.name.removeprefix(".") if node.name == ".size" else node.name
        if name == "matches" or name == ".matches":
            return self._pattern(node, parts)
        if name == "timestamp" and len(parts) == 1 and parts[0].constant and parts[0].type == TEXT:
            return _constant(node, self._moment(parts[0].node), TIME)
        signature = _FUNCTIONS.get(name)
        if signature is None or len(parts) != len(signature[0]):
            raise self._fail(node, f"there is no {node.name.removeprefix('.')} with {len(parts)} values here; there are {_NAMES}")
        for part, types in zip(parts, signature[0], strict=True):
            if part.type not in types and not (name == "size" and part.type.startswith("list")):
                raise self._fail(part.node, f"{node.name.removeprefix('.')} takes a {' or a '.join(types)}, not a {part.type}")
        work, runs = signature[2], [part.run for part in parts]
        if len(runs) == 1:
            one = runs[0]
            return Typed(signature[1], lambda fields: work(one(fields)), node, tuple(parts))
        first, second = runs
        return Typed(signature[1], lambda fields: work(first(fields), second(fields)), node, tuple(parts))

    def _moment(self, node: Node) -> int:
        try:
            found = datetime.fromisoformat(str(node.value))
        except ValueError:
            found = None
        if found is None or found.tzinfo is None:
            raise self._fail(node, 'a time is written as "2026-01-31T12:00:00Z", with its zone')
        return round(found.timestamp() * 1_000_000)

    def _pattern(self, node: Node, parts: Sequence[Typed]) -> Typed:
        if len(parts) != 2 or parts[0].type != TEXT or parts[1].type != TEXT or not parts[1].constant:
            raise self._fail(node, 'matches takes a text and a pattern that stands there: key.matches("^a+$")')
        try:
            pattern = patterns.searching(str(parts[1].node.value))
        except InvalidArgument as wrong:
            raise self._fail(parts[1].node, str(wrong)) from wrong
        known, one = dict[str, bool](), parts[0].run

        def run(fields: Fields) -> bool:
            text = str(one(fields))
            found = known.get(text)
            if found is None:
                if len(text) > MAX_MATCHED:
                    raise _Failed
                fields.work += MATCH_WORK * len(text)
                if len(known) >= MAX_REMEMBERED:
                    known.clear()
                found = known[text] = pattern.matches(text)
            return found

        return Typed(BOOL, run, node, tuple(parts))


def _constant(node: Node, value: bool | int | float | str, kind: str = "") -> Typed:
    names = {bool: BOOL, int: NUMBER, float: REAL, str: TEXT}
    return Typed(kind or names[type(value)], lambda _: value, node, constant=True)


def _joined(runs: Sequence[Run], *, decides: bool) -> Run:
    """|| if True decides, && if False does: an error counts only if no side decides."""

    def run(fields: Fields) -> bool:
        failed = False
        for each in runs:
            try:
                if bool(each(fields)) is decides:
                    return decides
            except _Failed:
                failed = True
        if failed:
            raise _Failed
        return not decides

    return run


def _header_of(fields: Fields, wanted: bytes) -> str:
    for name, value in fields.headers:
        if name == wanted:
            fields.work += len(value)
            return _text(value)
    raise _Failed


def _text(value: bytes | None) -> str:
    if value is None:
        raise _Failed
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _Failed from None


def _moment_of(fields: Fields) -> int:
    if fields.event_at_us is None:
        raise _Failed
    return fields.event_at_us


def _bounded(value: Any) -> Any:
    if type(value) is int and not -INT <= value < INT:
        raise _Failed
    if type(value) is str and len(value) > MAX_TEXT:
        raise _Failed
    return value


def _contains(text: str, piece: str) -> bool:
    """True if a piece is in a text, in linear time: filled up with bytes that UTF-8 does not have, where need be."""
    if len(text) * len(piece) <= PAIRS:
        return piece in text
    return text.encode().ljust(LINEAR, b"\xff").find(piece.encode()) >= 0


def _divided(left: Any, right: Any) -> Any:
    if not right:
        raise _Failed
    if type(left) is float:
        return left / right
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) is (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    if not right:
        raise _Failed
    return abs(left) % abs(right) * (-1 if left < 0 else 1)


def _int(value: Any) -> int:
    if type(value) is str:
        if not _WHOLE.fullmatch(value):
            raise _Failed
        value = int(value)
    elif type(value) is float:
        if not -INT < value < INT:
            raise _Failed
        value = int(value)
    return int(_bounded(value))


def _double(value: Any) -> float:
    if type(value) is str and (len(value) > MAX_NUMBER_TEXT or not _REAL.fullmatch(value)):
        raise _Failed
    return float(value)


_VARIABLES: Final[dict[str, tuple[str, Run]]] = {
    "headers": (HEADERS, lambda fields: fields.headers),
    "key": (TEXT, lambda fields: _text(fields.key)),
    "tag": (TEXT, lambda fields: _text(fields.tag)),
    "size": (NUMBER, lambda fields: fields.size),
    "slot": (NUMBER, lambda fields: fields.slot),
    "event_time": (TIME, _moment_of),
    "load_test": (BOOL, lambda fields: fields.load_test),
}
_OPTIONAL: Final = {"key": "key", "tag": "tag", "event_time": "event_at_us"}
"""Fields that a message may lack, and where they are."""
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_WORK: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divided, "%": _remainder,
}  # fmt: skip
_FUNCTIONS: Final[dict[str, tuple[Sequence[Sequence[str]], str, Callable[..., Any]]]] = {
    "size": ([(TEXT,)], NUMBER, len),
    "int": ([(TEXT, REAL, NUMBER)], NUMBER, _int),
    "double": ([(TEXT, REAL, NUMBER)], REAL, _double),
    ".startsWith": ([(TEXT,), (TEXT,)], BOOL, str.startswith),
    ".endsWith": ([(TEXT,), (TEXT,)], BOOL, str.endswith),
    ".contains": ([(TEXT,), (TEXT,)], BOOL, _contains),
}
"""Name, with a dot if it is a method → types of its values, its own, and what it does."""
_NAMES: Final = "has, size, int, double, timestamp, and of texts startsWith, endsWith, contains, matches"
_NOBODY: Any = None
"""Argument with which a constant is evaluated."""


def _size(node: Node) -> int:
    return 1 + sum(map(_size, node.parts))


# --- bytes of which one must be there


def _needles(found: Typed) -> Sequence[bytes] | None:
    """Bytes of which one is in each message for which this is true; None: nothing is known."""
    parts, kind = found.parts, found.node.kind
    if kind == "&&":
        return min((known for part in parts if (known := _needles(part))), key=len, default=None)
    if kind == "||":
        each = [_needles(part) for part in parts]
        joined = [needle for known in each if known for needle in known]
        return joined if all(each) and len(joined) <= MAX_NEEDLES else None
    if kind == "?":
        return _read(parts[0])
    if kind in ("==", "in") and parts[1].constant and (values := _texts(parts[1])):
        exact = [_stored(parts[0], value.encode()) for value in values]
        if all(exact) and len(exact) <= MAX_NEEDLES:
            return exact
    if kind == "in" and parts[1].type == HEADERS and parts[0].constant:
        return [name] if (name := str(parts[0].node.value).encode()) else None
    if kind == "call" and found.node.name == ".startsWith" and parts[0].header and parts[1].constant:
        return [parts[0].header + str(parts[1].node.value).encode()]
    if kind == "call" and found.node.name == "has":
        return [parts[0].header] if parts[0].header else None
    return _read(found)


def _texts(found: Typed) -> list[str]:
    """The texts of a constant, or of a list of constants; none if there are others."""
    values = [part.node.value for part in found.parts] if found.node.kind == "list" else [found.node.value]
    return [value for value in values if isinstance(value, str)] if found.type.endswith(TEXT) else []


def _stored(found: Typed, value: bytes) -> bytes:
    """A field with a value as a block holds it; empty: it is none."""
    if found.header and len(value) <= 0xFFFF:
        return HEADER.pack(len(found.header), len(value)) + found.header + value
    if found.node.kind == "name" and found.node.name == "key" and len(value) <= 0xFFFF:
        return U16.pack(len(value)) + value
    if found.node.kind == "name" and found.node.name == "tag" and len(value) < 256:
        return bytes((len(value),)) + value
    return b""


def _read(found: Typed) -> Sequence[bytes] | None:
    """The name of a header without which this has no value; None: none is known."""
    if found.header:
        return [found.header]
    if found.node.kind in ("&&", "||") or (found.node.kind == "call" and found.node.name == "has"):
        return None
    parts = found.parts[:1] if found.node.kind == "?" else found.parts
    return next((known for part in parts if (known := _read(part))), None)
