"""Permissions: an ordered list of rules, of which the first that fits decides; actions that no rule allows are denied. Pure.

    [[rule]]
    allow = ["publish", "subscribe"]     # or deny = …; or ask = … and callback = "live"
    groups = ["players"]                 # who: users, groups, claims; without any: everybody who is logged in
    rooms = ["1-1000"]                   # what: rooms, topics, users; without any: everything
    topics = ["games/{uin}/#"]

A user's rules are selected once, and logins that are equal for the rules share the selection. Decisions on a target are remembered,
so that a message costs one dictionary look-up.

A rule that denies or asks fails closed: for a name that a login does not have, it denies every possible value of the name.

Source: docs/security.md, "Rules"; MQTT 3.1.1 section 4.7 (filters).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cluster.trust.identity import UNUSABLE, Identity
from pixiu.errors import NotAllowed
from pixiu.ids import MAX_ID
from pixiu.placement.topics import ROOM_PREFIX, USER_PREFIX

PUBLISH: Final = "publish"
SUBSCRIBE: Final = "subscribe"
SIGNAL: Final = "signal"
MAIL: Final = "mail"
INBOX: Final = "inbox"
PRESENCE: Final = "presence"
IMPERSONATE: Final = "impersonate"
PRODUCE: Final = "produce"
CONSUME: Final = "consume"
CHANNEL: Final = "channel"
TOPICS: Final = "topics"
REVOKE: Final = "revoke"
"""To end subscriptions of others. It has no target."""
OF_TOPICS: Final = (PRODUCE, CONSUME, CHANNEL, TOPICS)
"""Actions on durable topics; their target is the topic's name."""
ACTIONS: Final = (PUBLISH, SUBSCRIBE, SIGNAL, MAIL, INBOX, PRESENCE, IMPERSONATE, REVOKE, *OF_TOPICS)
ALL: Final = "*"

Target = int | str
"""A room's number as a positive integer, a user's UIN as a negative one, a free or durable topic as its name."""

Decision = bool | str
"""Yes, no, or the name of the callback to ask."""
HELD: Final = (SUBSCRIBE, INBOX)
"""Actions with a lasting effect: the session holds the result."""
MAX_REMEMBERED: Final = 64
"""Decisions that one session remembers, about 25 KB at most; beyond this all are forgotten. A new decision costs 1 µs more."""
MAX_GIVEN: Final = 4096
"""Limit for each session of held grants of callbacks, and of questions to callbacks."""
MAX_REMEMBERED_TOPIC: Final = 128
"""Longest topic whose decision is remembered, characters."""
MAX_RULES: Final = 1000
MAX_CHOICES: Final = 1024
"""Kinds of logins whose selection of rules is remembered; beyond this all are forgotten."""
_TEMPLATE: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
_UNSAFE: Final = frozenset("#+/\0$")
ANY: Final = "+"
"""A filter's level that matches every level."""


def of_user(uin: int) -> Target:
    """Target of a user."""
    return -uin


def of_topic_name(name: str) -> Target:
    """Target of a topic's name: `room/42`, `user/7` or a free topic."""
    for prefix, sign in ((ROOM_PREFIX, 1), (USER_PREFIX, -1)):
        digits = name.removeprefix(prefix)
        if digits != name and digits.isascii() and digits.isdecimal() and len(digits) <= 19:
            return sign * int(digits)
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRule:
    """One rule of the file. Numbers are ranges (first, last), both included; texts are templates."""

    allow: bool
    actions: frozenset[str]
    ask: str = ""
    """Callback that decides instead of `allow`; empty: none."""
    users: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    claims: Mapping[str, str] = field(default_factory=dict)
    rooms: tuple[tuple[int, int], ...] = ()
    topics: tuple[str, ...] = ()
    uins: tuple[tuple[int, int] | str, ...] = ()

    def is_for(self, identity: Identity) -> bool:
        """True if the rule applies to an identity: it is or has one of the named users or groups, and has every named claim."""
        named = not (self.users or self.groups) or identity.user in self.users or not self.groups.isdisjoint(identity.groups)
        return named and all(self._fits(identity.claims.get(name), value) for name, value in self.claims.items())

    def _fits(self, claim: str | None, value: str) -> bool:
        return claim == value or (claim == UNUSABLE and not self.allow)

    @property
    def names(self) -> frozenset[str]:
        """Names in its templates."""
        texts = (*self.topics, *(item for item in self.uins if isinstance(item, str)))
        return frozenset(name for text in texts for name in _TEMPLATE.findall(text))


OWN: Final = AccessRule(allow=True, actions=frozenset((SUBSCRIBE, INBOX, PRESENCE)), uins=("{uin}",))
"""The last rule of everybody: they may receive what is sent to them."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A rule selected for some logins. Its templates are filled when a target has matched up to their level."""

    number: int
    """Position in the file, from 1."""
    decision: Decision
    everything: bool
    rooms: tuple[tuple[int, int], ...]
    topics: tuple[tuple[str, ...], ...]
    uins: tuple[tuple[int, int] | str, ...]

    def covers(self, target: Target, names: Mapping[str, str]) -> bool:
        if self.everything:
            return True
        if isinstance(target, str):
            levels = target.split("/")
            if self.decision is not True and ("+" in target or "#" in target):
                # A filter gets whatever it matches, so a rule that denies or asks holds for all that it may have in common with it.
                return any(overlaps(filter_, levels, names) for filter_ in self.topics)
            for filter_ in self.topics:  # noqa: SIM110 (a generator costs more than the check)
                if matches(filter_, levels, names):
                    return True
            return False
        if target > 0:
            for low, high in self.rooms:  # noqa: SIM110 (a generator costs more than the check)
                if low <= target <= high:
                    return True
            return False
        return any(low <= -target <= high for item in self.uins for low, high in (_range(item, names),))


class _Choice:
    """Rules for some logins: by action, in their order. names: names that templates need and these logins have."""

    __slots__ = ("asks", "by_action", "names")

    def __init__(self, rules: Sequence[tuple[int, AccessRule]], has: frozenset[str]) -> None:
        self.by_action: dict[str, list[_Chosen]] = {}
        used: set[str] = set()
        for number, rule in rules:
            if rule.allow and not rule.names <= has:
                continue
            # For a name that they do not have, a rule that denies or asks denies every possible value of the name.
            decision = (rule.ask or rule.allow) if rule.names <= has else False
            used |= rule.names & has
            everything = not (rule.rooms or rule.topics or rule.uins)
            topics = tuple(tuple(topic.split("/")) for topic in rule.topics)
            chosen = _Chosen(number, decision, everything, rule.rooms, topics, rule.uins)
            for action in rule.actions:
                self.by_action.setdefault(action, []).append(chosen)
        self.names = frozenset(used)
        self.asks = any(isinstance(rule.decision, str) for rules_ in self.by_action.values() for rule in rules_)


class RuleSet:
    """The rules of a file, followed by `OWN`. Logins that are equal for the rules share a selection."""

    def __init__(self, rules: Sequence[AccessRule]) -> None:
        self._rules = list(enumerate((*rules, OWN), 1))
        self._users = frozenset(user for _, rule in self._rules for user in rule.users)
        self._groups = frozenset(group for _, rule in self._rules for group in rule.groups)
        self._claims = sorted({name for _, rule in self._rules for name in rule.claims})
        self._names = frozenset(name for _, rule in self._rules for name in rule.names)
        self._chosen: dict[tuple[object, ...], _Choice] = {}

    def about(self, identity: Identity, names: Mapping[str, str]) -> _Choice:
        """Selection for a login with these names."""
        has = self._names.intersection(names)
        claims = tuple(identity.claims.get(name) for name in self._claims)
        kind = identity.user if identity.user in self._users else None, identity.groups & self._groups, claims, has
        found = self._chosen.get(kind)
        if found is None:
            if len(self._chosen) >= MAX_CHOICES:
                self._chosen.clear()
            about = [(number, rule) for number, rule in self._rules if rule.is_for(identity)]
            found = self._chosen[kind] = _Choice(about, has)
        return found


def _unanswered(callback: str, action: str, target: Target) -> bool | None:
    return None


class Permissions:
    """Permissions of one session.

    Args:
        identity: of the session.
        rules: those of the file, followed by `OWN`.
        client_id: of the session's client.
        answers: returns the remembered answer for a callback (its name), an action and a target; None: none. Without an answer the
            decision is no, except for what the session was granted before: a port calls `foresee` and asks first.

    Raises `NotAllowed` if a name of the session would change the meaning of a rule's template.
    """

    __slots__ = ("_answers", "_choice", "_given", "_known", "_names", "foreseen", "identity", "may_impersonate")

    def __init__(
        self, identity: Identity, rules: RuleSet, client_id: str = "",
        answers: Callable[[str, str, Target], bool | None] = _unanswered,
    ) -> None:  # fmt: skip
        self.identity, self._answers = identity, answers
        names = {**{f"claim.{name}": value for name, value in identity.claims.items()}}
        names["username"] = identity.user
        if client_id:
            names["client_id"] = client_id
        if identity.uin:
            names["uin"] = str(identity.uin)
        self._choice = rules.about(identity, names)
        self._names = {name: names[name] for name in self._choice.names}
        for name, text in self._names.items():
            if not text or not _UNSAFE.isdisjoint(text):
                raise NotAllowed(f"the {name} of this login cannot stand in a rule's topic: it is empty or contains # + / $ or NUL")
        self.foreseen: dict[tuple[str, str, Target], None] = {}
        """Questions to ask: callback, action, target."""
        self._given: set[tuple[str, str, Target]] = set()
        """Held subscriptions and inboxes that a callback allowed."""
        self._known: dict[tuple[str, Target], Decision] = {}
        self.may_impersonate = self.allows(IMPERSONATE, ALL)

    @property
    def asks(self) -> bool:
        """True if a callback may have to be asked."""
        return self._choice.asks

    def allows(self, action: str, target: Target) -> bool:
        """True if the session may perform an action on a target."""
        known = self._known.get((action, target))
        if known is None:
            known = self._decide(action, target)
        return known if known is True or known is False else self._by_callback(known, action, target)

    def foresee(self, action: str, target: Target) -> None:
        """Note in `foreseen` the question that a callback must answer before this action is tried, if any."""
        decision = self._known.get((action, target))
        if decision is None:
            decision = self._first(action, target)
        if isinstance(decision, str) and len(self.foreseen) < MAX_GIVEN and self._answers(decision, action, target) is None:
            self.foreseen[decision, action, target] = None

    def keep(self, older: Permissions) -> None:
        """Keep grants of callbacks for as long as the rules ask the same callback."""
        self._given = older._given

    def _by_callback(self, callback: str, action: str, target: Target) -> bool:
        question, answer = (callback, action, target), self._answers(callback, action, target)
        if answer is None:
            return question in self._given
        if not answer:
            self._given.discard(question)
        elif action in HELD and len(self._given) < MAX_GIVEN:
            self._given.add(question)
        return answer

    def forget(self, action: str, target: Target) -> None:
        """Forget what callbacks have granted."""
        self._given = {given for given in self._given if given[1:] != (action, target)}

    def seen(self, action: str, target: Target) -> bool:
        """True if a decision is remembered; a new one is worth a line in the audit log."""
        return (action, target) in self._known

    def require(self, action: str, target: Target) -> None:
        """Raise `NotAllowed` unless the session may do it."""
        if not self.allows(action, target):
            may_not = f"has no right to `{action}` with" if action in OF_TOPICS else f"may not {action}"
            raise NotAllowed(f"this login {may_not} {name_of(target)}; `pixiu acl test` says which rule decides")

    def rule_of(self, action: str, target: Target) -> int:
        """Number of the rule that decides, from 1 in the order of the file; `OWN` has the next number, 0: no rule decides."""
        return next((rule.number for rule in self._choice.by_action.get(action, ()) if rule.covers(target, self._names)), 0)

    def _first(self, action: str, target: Target) -> Decision:
        for rule in self._choice.by_action.get(action, ()):
            if rule.covers(target, self._names):
                return rule.decision
        return False

    def _decide(self, action: str, target: Target) -> Decision:
        decision = self._first(action, target)
        if isinstance(target, str) and len(target) > MAX_REMEMBERED_TOPIC:
            return decision
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[action, target] = decision
        return decision


def topic_of(target: Target) -> str:
    """Name of a target for clients and callbacks: `room/42`, `user/7` or a free topic."""
    if isinstance(target, str):
        return target
    return f"{ROOM_PREFIX}{target}" if target > 0 else f"{USER_PREFIX}{-target}"


def name_of(target: Target) -> str:
    """Name of a target for people."""
    if isinstance(target, str):
        return f"the topic {target[:80]!r}" if target != ALL else "anybody"
    return f"room {target}" if target > 0 else f"user {-target}"


def matches(filter_: Sequence[str], levels: Sequence[str], names: Mapping[str, str]) -> bool:
    """True if a filter, by levels, matches a topic's levels; names fill its templates. `#` matches no topic that begins with
    `$`."""
    for index, level in enumerate(filter_):
        if level == "#":
            return not (index == 0 and levels[0].startswith("$"))
        if index >= len(levels):
            return False
        found = levels[index]
        if level != found:
            filled = _fill(level, names) if "{" in level else level
            if filled != found and (filled != ANY or found == "#"):
                return False
    return len(filter_) == len(levels)


def overlaps(filter_: Sequence[str], wanted: Sequence[str], names: Mapping[str, str]) -> bool:
    """True if a rule's filter and a filter of a client, by levels, may match a topic in common; names fill the rule's templates."""
    if (filter_[0] in "#+" and wanted[0].startswith("$")) or (wanted[0] in "#+" and filter_[0].startswith("$")):
        return False
    for index in range(max(len(filter_), len(wanted))):
        left = filter_[index] if index < len(filter_) else ""
        right = wanted[index] if index < len(wanted) else ""
        if "#" in (left, right):
            return True
        if index >= len(filter_) or index >= len(wanted):
            return False
        filled = _fill(left, names) if "{" in left else left
        if ANY not in (filled, right) and filled != right:
            return False
    return True


def _fill(template: str, names: Mapping[str, str]) -> str:
    """Fill a level, or a user, with names; `ANY` if one of them is missing."""
    try:
        return _TEMPLATE.sub(lambda found: names[found[1]], template)
    except KeyError:
        return ANY


def _range(item: tuple[int, int] | str, names: Mapping[str, str]) -> tuple[int, int]:
    """Range of users: a given one, the number that a template became, or all. An invalid one matches nobody."""
    if not isinstance(item, str):
        return item
    text = _fill(item, names)
    if text == ANY:
        return 1, MAX_ID
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 19 else 0
    return (number, number) if 0 < number <= MAX_ID else (1, 0)


NOTHING: Final = Permissions(Identity("", 0), RuleSet((AccessRule(allow=False, actions=frozenset(ACTIONS)),)))
"""Permissions of a session that is over."""
