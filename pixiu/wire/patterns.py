"""Patterns on short texts, globs and a subset of regular expressions, matched in time linear in the text. Pure.

    glob     *  any characters    ?  one    [a-z] [!a-z]  one of these, none of these    all others are themselves
    regex    literals  .  [a-z] [^a-z]  \\d \\w \\s \\D \\W \\S  ( )  (?: )  |  * + ? {m} {m,} {m,n}      and  \\  before a sign

A pattern matches whole texts; `^` at its beginning and `$` at its end say so and change nothing. There are no back-references and
no look-around, so a pattern is an automaton with one state for each of its signs. The set of its states moves with each character
of the text, and there is no backtracking: nested repetitions cost no more than others.

Source: docs/topics.md, "Filters, tags, load tests"; V. M. Glushkov, "The abstract theory of automata" (1961): positions as states.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pixiu.errors import InvalidArgument

MAX_PATTERN: Final = 256
"""Characters of a pattern."""
MAX_STATES: Final = 512
"""Signs of a pattern, repetitions with numbers written out."""
MAX_STEPS: Final = 4096
"""Steps that a pattern remembers. Policy: then it forgets all."""
MAX_DEPTH: Final = 20
"""Groups within groups."""
_CLASSES: Final = {"d": "0-9", "w": "a-zA-Z0-9_", "s": " \t\n\r\f\v"}
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}


class Signs(NamedTuple):
    """A set of characters."""

    ranges: tuple[tuple[str, str], ...] = ()
    """First and last character of each."""
    negated: bool = False

    def has(self, sign: str) -> bool:
        return any(low <= sign <= high for low, high in self.ranges) is not self.negated


ANY: Final = Signs(negated=True)


class Node(NamedTuple):
    """A piece of a pattern: `signs` alone, or parts joined by `kind`."""

    kind: str
    """"signs", "then", "or", "many" (none or more), "maybe"."""
    signs: Signs = ANY
    parts: tuple[Node, ...] = ()
    size: int = 1
    """Signs in it."""


def _then(parts: list[Node]) -> Node:
    return Node("then", parts=tuple(parts), size=max(1, sum(part.size for part in parts)))  # an empty one costs, too


class Pattern:
    """A compiled pattern. Make it by `glob` or `regex`."""

    def __init__(self, root: Node) -> None:
        self._takers: dict[Signs, int] = {}
        """Signs → the states that they lead to, as bits."""
        self._follow: list[int] = []
        """By state: those that may come after it, as bits."""
        self._empty, self._first, self._last = self._build(root)
        self._steps: dict[tuple[int, str], int] = {}
        self._taking: dict[str, int] = {}
        """Character → the states that it leads to."""
        self._after: dict[tuple[int, int], int] = {}
        """(number of a byte of states, its bits) → those that may come after them."""

    def _build(self, node: Node) -> tuple[bool, int, int]:
        """True if it matches the empty text; states that may come first, and last."""
        if node.kind == "signs":
            state = 1 << len(self._follow)
            self._follow.append(0)
            self._takers[node.signs] = self._takers.get(node.signs, 0) | state
            return False, state, state
        found = [self._build(part) for part in node.parts]
        if node.kind == "or":
            empty, first, last = False, 0, 0
            for each in found:
                empty, first, last = empty or each[0], first | each[1], last | each[2]
            return empty, first, last
        if node.kind == "then":
            empty, first, last = True, 0, 0
            for each_empty, each_first, each_last in found:
                self._link(last, each_first)
                first |= each_first if empty else 0
                last = each_last | (last if each_empty else 0)
                empty = empty and each_empty
            return empty, first, last
        ((_, first, last),) = found
        if node.kind == "many":
            self._link(last, first)
        return True, first, last

    def _link(self, after: int, then: int) -> None:
        for state in _bits(after):
            self._follow[state] |= then

    def matches(self, text: str) -> bool:
        """True if the whole text is one that the pattern describes."""
        if not text:
            return self._empty
        steps, states = self._steps, -1  # -1: at the beginning
        for sign in text:
            found = steps.get((states, sign))
            if found is None:
                found = self._step(states, sign)
            if not found:
                return False
            states = found
        return bool(states & self._last)

    def _step(self, states: int, sign: str) -> int:
        found = (self._first if states == -1 else self._following(states)) & self._states_of(sign)
        if len(self._steps) >= MAX_STEPS:
            self._steps.clear()
        self._steps[states, sign] = found
        return found

    def _following(self, states: int) -> int:
        """States that may come after these, eight at a time."""
        found, known = 0, self._after
        for place, bits in enumerate(states.to_bytes(MAX_STATES // 8, "little")):
            if bits:
                after = known.get((place, bits))
                if after is None:
                    after = 0
                    for state in _bits(bits):
                        after |= self._follow[8 * place + state]
                    known[place, bits] = after
                found |= after
        return found

    def _states_of(self, sign: str) -> int:
        found = self._taking.get(sign)
        if found is None:
            if len(self._taking) >= MAX_STEPS:
                self._taking.clear()
            found = self._taking[sign] = sum(states for signs, states in self._takers.items() if signs.has(sign))
        return found


def _bits(states: int) -> list[int]:
    found = list[int]()
    while states:
        found.append((states & -states).bit_length() - 1)
        states &= states - 1
    return found


def glob(text: str) -> Pattern:
    """Compile a glob. Raises InvalidArgument."""
    return Pattern(_checked(_Reader(text).glob(), text))


def regex(text: str) -> Pattern:
    """Compile a regular expression. Raises InvalidArgument."""
    inner = text.removeprefix("^")
    if inner.endswith("$") and (len(inner) - len(inner[:-1].rstrip("\\"))) % 2:
        inner = inner[:-1]
    return Pattern(_checked(_Reader(inner).whole(), text))


def searching(text: str) -> Pattern:
    """Compile a regular expression that may match anywhere in a text; `^` at its beginning and `$` at its end hold it there. Raises
    InvalidArgument."""
    begins = text.startswith("^")
    inner = text.removeprefix("^")
    ends = inner.endswith("$") and bool((len(inner) - len(inner[:-1].rstrip("\\"))) % 2)
    root = _Reader(inner[:-1] if ends else inner).whole()
    if root.kind == "or" and (begins or ends):
        raise InvalidArgument(f"the pattern {text!r}: put the alternatives into ( ), so that it is clear what ^ and $ belong to")
    anything = Node("many", parts=(Node("signs"),))
    return Pattern(_checked(_then([*([] if begins else [anything]), root, *([] if ends else [anything])]), text))


def _checked(root: Node, text: str) -> Node:
    if root.size > MAX_STATES:
        raise InvalidArgument(f"the pattern {text!r} has {root.size} signs with its repetitions; {MAX_STATES} are allowed")
    return root


class _Reader:
    def __init__(self, text: str) -> None:
        if len(text) > MAX_PATTERN:
            raise InvalidArgument(f"a pattern has at most {MAX_PATTERN} characters, this one {len(text)}")
        self._text, self._at, self._depth = text, 0, 0

    def _problem(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"the pattern {self._text!r}: {what}, at character {self._at + 1}")

    def _next(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _take(self) -> str:
        sign = self._next()
        if not sign:
            raise self._problem("it ends too early")
        self._at += 1
        return sign

    def glob(self) -> Node:
        found = list[Node]()
        while sign := self._next():
            self._at += 1
            if sign == "*":
                found.append(Node("many", parts=(Node("signs"),)))
            elif sign == "?":
                found.append(Node("signs"))
            elif sign == "[":
                found.append(Node("signs", self._set("!")))
            else:
                found.append(_one(sign))
        return _then(found)

    def whole(self) -> Node:
        found = self._either()
        if self._next():
            raise self._problem("a ) without its (")
        return found

    def _either(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._problem(f"more than {MAX_DEPTH} groups within each other")
        found = [self._sequence()]
        while self._next() == "|":
            self._at += 1
            found.append(self._sequence())
        self._depth -= 1
        return found[0] if len(found) == 1 else Node("or", parts=tuple(found), size=sum(each.size for each in found))

    def _sequence(self) -> Node:
        found = list[Node]()
        while (sign := self._next()) and sign not in "|)":
            found.append(self._repeated(self._atom()))
        return _then(found)

    def _atom(self) -> Node:
        sign = self._take()
        if sign == "(":
            if self._text.startswith("?:", self._at):
                self._at += 2
            elif self._next() == "?":
                raise self._problem("of the groups that begin with (? only (?: is known")
            found = self._either()
            if self._take() != ")":
                raise self._problem("a ( without its )")
            return found
        if sign == "[":
            return Node("signs", self._set("^"))
        if sign == "\\":
            return Node("signs", self._escaped())
        if sign == ".":
            return Node("signs")
        if sign in "*+?{^$":
            raise self._problem(f"{sign} stands where a character must be; write \\{sign} for the character")
        return _one(sign)

    def _escaped(self) -> Signs:
        sign = self._take()
        if sign.lower() in _CLASSES:
            return _Reader(_CLASSES[sign.lower()] + "]")._set("")._replace(negated=sign.isupper())
        sign = _CONTROLS.get(sign, sign)
        if sign.isalnum():
            raise self._problem(f"\\{sign} is not known")
        return Signs(((sign, sign),))

    def _set(self, negation: str) -> Signs:
        """The signs up to ]."""
        negated = bool(negation) and self._next() == negation
        self._at += negated
        ranges = list[tuple[str, str]]()
        while (sign := self._take()) != "]" or not ranges:
            if sign == "\\":
                inner = self._escaped()
                if inner.negated:
                    raise self._problem("a negated class within [ ]")
                ranges += inner.ranges
                continue
            last = sign
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._take()
                if last == "\\" or last < sign:
                    raise self._problem(f"the range {sign}-{last}")
            ranges.append((sign, last))
        return Signs(tuple(ranges), negated)

    def _repeated(self, node: Node) -> Node:
        sign = self._next()
        if not sign or sign not in "*+?{":
            return node
        self._at += 1
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign] if sign != "{" else self._numbers()
        if self._next() and self._next() in "*+?{":
            raise self._problem("a repetition of a repetition; put the first into ( )")
        parts = [node] * low
        if high is None:
            parts.append(Node("many", parts=(node,), size=node.size))
        else:
            parts += [Node("maybe", parts=(node,), size=node.size)] * (high - low)
        return _checked(_then(parts), self._text)

    def _numbers(self) -> tuple[int, int | None]:
        inner, closed, _ = self._text[self._at :].partition("}")
        low, comma, high = inner.partition(",")
        if not closed or not low.isdecimal() or len(inner) > 9 or (high and not high.isdecimal()):
            raise self._problem("a repetition is {m}, {m,} or {m,n}")
        self._at += len(inner) + 1
        most = int(high) if high else None if comma else int(low)
        if max(int(low), most or 0) > MAX_STATES or (most is not None and most < int(low)):
            raise self._problem(f"the repetition {{{inner}}}; the numbers rise and are at most {MAX_STATES}")
        return int(low), most


def _one(sign: str) -> Node:
    return Node("signs", Signs(((sign, sign),)))
