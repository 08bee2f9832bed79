"""Filters of channels: conditions on the headers of messages, or an expression. Pure.

    [{"header": "region", "equal": "eu"},            all conditions hold: the message matches
     {"header": "kind", "any_of": ["a", "b"]},       one of these texts
     {"header": "sku", "glob": "x-*"},               patterns on the whole value: `pixiu.wire.patterns`
     {"header": "path", "regex": "/a/[0-9]+"},
     {"header": "state", "not": {"equal": "old"}}]   the header is there, and the condition does not hold

Values are compared as UTF-8. A message without the header of a condition does not match, whatever the condition is. Of several
headers with one name, one that fulfils the condition is enough, and none may fulfil what is negated.

A filter that does not begin with [ is an expression: `pixiu.wire.expressions`.

A block is searched for the bytes of a header first, so messages that cannot match cost no more than their bytes.

Source: docs/topics.md, "Filters, tags, load tests".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from pixiu.errors import InvalidArgument
from pixiu.wire import cel, patterns
from pixiu.wire.block import HEADER, Block, Flag
from pixiu.wire.expressions import MATCH_WORK, STEP_WORK, Expression

MAX_FILTER_BYTES: Final = 4096
"""Of the JSON."""
MAX_CONDITIONS: Final = 16
MAX_VALUES: Final = 64
"""Texts of one `any_of`."""
MAX_MATCHED: Final = 1024
"""Bytes of a value that a pattern looks at. Policy: a longer one does not match."""
MAX_REMEMBERED: Final = 4096
"""Values of which a pattern remembers whether they match. Policy: then it forgets all."""
_TESTS: Final = ("equal", "any_of", "glob", "regex", "not")


class Filter(Protocol):
    """Interface to what chooses messages."""

    errors: int
    """Messages for which an expression had no value; they did not match."""
    work: int
    """Bytes that it has looked at, about; whoever reads it may reset it."""

    def matching(self, block: Block, low: int, high: int) -> list[int]:
        """The numbers of a block's messages [low, high) that match, rising."""


def parse(text: str) -> Filter:
    """Parse a filter: conditions if it begins with [, else an expression. Raises InvalidArgument."""
    return Conditions(text) if _is_list(text) else Expression(text)


def _is_list(text: str) -> bool:
    return text.lstrip()[:1] in ("[", "{")


class Condition(NamedTuple):
    """One condition."""

    header: bytes
    holds: Callable[[bytes], bool]
    values: Sequence[bytes]
    """The values that fulfil it, if it names them; none: it is a pattern."""
    negated: bool


class Conditions:
    """A parsed list of conditions.

    Args:
        text: JSON.

    Raises InvalidArgument.
    """

    def __init__(self, text: str) -> None:
        self.conditions = _parsed(text)
        needles = [
            [HEADER.pack(len(each.header), len(value)) + each.header + value for value in each.values]
            for each in self.conditions
            if each.values and not each.negated
        ]
        self.errors = self.work = 0
        self._needles = min(needles, key=len, default=[])
        """Bytes of which one is in each message that matches; none: nothing is known in advance."""

    def matching(self, block: Block, low: int, high: int) -> list[int]:
        """The numbers of a block's messages [low, high) that match, rising."""
        if not block.flags & Flag.HEADERS:
            return []
        flags, found = block.all_flags(), list[int]()
        numbers = block.having(self._needles, low, high) if self._needles else range(low, high)
        work, conditions = len(self._needles) * block.length(low, high), len(self.conditions)
        for number in numbers:
            if flags[number] & Flag.HEADERS:
                headers = block.headers(number)
                size = sum(len(value) for _, value in headers)
                work += size + conditions * (STEP_WORK * len(headers) + MATCH_WORK * min(size, MAX_MATCHED))
                if self.holds(headers):
                    found.append(number)
        self.work += work
        return found

    def holds(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """True if all conditions hold for a message with these headers."""
        for condition in self.conditions:
            there, hit, holds = False, False, condition.holds
            for name, value in headers:
                if name == condition.header:
                    there = True
                    if holds(value):
                        hit = True
                        break
            if not there or hit is condition.negated:
                return False
        return True


def same(one: str, other: str) -> bool:
    """True if two filters say the same. Raises InvalidArgument."""
    if one == other:
        return True
    if not one or not other or _is_list(one) is not _is_list(other):
        return False
    return _unjson(one) == _unjson(other) if _is_list(one) else cel.words(one) == cel.words(other)


def _parsed(text: str) -> list[Condition]:
    found = _unjson(text)
    if not isinstance(found, list) or not 0 < len(found) <= MAX_CONDITIONS:
        raise InvalidArgument(f"a filter is a list of 1 to {MAX_CONDITIONS} conditions")
    return [_condition(each) for each in found]


def _unjson(text: str) -> object:
    if len(text.encode()) > MAX_FILTER_BYTES:
        raise InvalidArgument(f"a filter has at most {MAX_FILTER_BYTES} bytes")
    try:
        found: object = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()  # an escape may be half a character, which no header has
        return found
    except (ValueError, RecursionError) as problem:
        raise InvalidArgument("a filter is JSON: a list of conditions on headers") from problem


def _condition(found: Any) -> Condition:
    if not isinstance(found, dict) or len(found) != 2 or not isinstance(name := found.get("header"), str):
        raise InvalidArgument(f'a condition has "header" and one of {", ".join(_TESTS)}; this one is {_short(found)}')
    header = name.encode()
    if not 0 < len(header) < 256:
        raise InvalidArgument(f"a header's name has 1 to 255 bytes; this one has {len(header)}")
    ((test, value),) = ((test, value) for test, value in found.items() if test != "header")
    negated = test == "not"
    if negated:
        if not isinstance(value, dict) or len(value) != 1:
            raise InvalidArgument(f'"not" has one condition without a header, {{"equal": "x"}} for example; not {_short(value)}')
        ((test, value),) = value.items()
    if test in ("glob", "regex") and isinstance(value, str):
        pattern = patterns.glob(value) if test == "glob" else patterns.regex(value)
        return Condition(header, _Remembered(pattern), (), negated)
    values = list(_values(test, value))
    return Condition(header, frozenset(values).__contains__, values, negated)


def _values(test: str, value: object) -> Iterator[bytes]:
    texts = value if test == "any_of" else [value] if test == "equal" else None
    if not isinstance(texts, list) or not 0 < len(texts) <= MAX_VALUES or not all(isinstance(each, str) for each in texts):
        raise InvalidArgument(
            f'{_short({test: value})}: write "equal", "glob" or "regex" with a text, or "any_of" with 1 to {MAX_VALUES} texts'
        )
    for each in texts:
        encoded = each.encode()
        if len(encoded) > 0xFFFF:
            raise InvalidArgument("a header's value has at most 65535 bytes")
        yield encoded


def _short(found: object) -> str:
    return json.dumps(found)[:80]


class _Remembered:
    """A pattern with the values that it saw."""

    def __init__(self, pattern: patterns.Pattern) -> None:
        self._pattern = pattern
        self._known: dict[bytes, bool] = {}

    def __call__(self, value: bytes) -> bool:
        found = self._known.get(value)
        if found is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            found = self._known[value] = self._matches(value)
        return found

    def _matches(self, value: bytes) -> bool:
        try:
            return len(value) <= MAX_MATCHED and self._pattern.matches(value.decode())
        except UnicodeDecodeError:
            return False
