"""What somebody may do: an ordered list of rules, of which the first that fits decides; what none allows is denied. Pure.

    [[rule]]
    allow = ["publish", "subscribe"]     # or deny = …; or ask = … and callback = "live"
    groups = ["players"]                 # who: users, groups, claims; without any: everybody who is logged in
    rooms = ["1-1000"]                   # what: rooms, topics, users; without any: everything
    topics = ["games/{uin}/#"]

A user's rules are chosen, and their templates filled, once; what they say of one target is remembered, so that a message
costs one look into a dictionary. Logins of which the rules see the same (`RuleSet`) share what was chosen, and rules without
templates are filled once for all.

A rule that denies or asks fails closed: about a name that a login does not have it denies whatever the name could have stood for.

Source: docs/security.md, "Rules"; MQTT 3.1.1 section 4.7 (filters).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cluster.access.identity import UNUSABLE, Identity
from pixiu.errors import NotAllowed
from pixiu.ids import MAX_ID
from pixiu.mqtt.topics import ROOM_PREFIX, USER_PREFIX

PUBLISH: Final = "publish"
SUBSCRIBE: Final = "subscribe"
SIGNAL: Final = "signal"
MAIL: Final = "mail"
INBOX: Final = "inbox"
PRESENCE: Final = "presence"
IMPERSONATE: Final = "impersonate"
ACTIONS: Final = (PUBLISH, SUBSCRIBE, SIGNAL, MAIL, INBOX, PRESENCE, IMPERSONATE)
ALL: Final = "*"

Target = int | str
"""A room's number as a positive integer, a user's UIN as a negative one, a free topic as its name."""

Decision = bool | str
"""Yes, no, or the name of the callback that is asked."""
HELD: Final = (SUBSCRIBE, INBOX)
"""What a session does not only do, but has from then on."""
MAX_REMEMBERED: Final = 4096
"""Answers that one session remembers; beyond it all are forgotten."""
MAX_REMEMBERED_TOPIC: Final = 128
"""Characters of a topic for which the answer is remembered."""
MAX_RULES: Final = 1000
MAX_CHOICES: Final = 1024
"""Kinds of logins for which it is remembered which rules are about them; beyond it all are forgotten."""
_TEMPLATE: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
_UNSAFE: Final = frozenset("#+/\0$")
ANY: Final = "+"
"""A level of a filter that every level fits."""


def of_user(uin: int) -> Target:
    """A user as a target."""
    return -uin


def of_topic_name(name: str) -> Target:
    """What a topic's name is as a target: `room/42`, `user/7` or a free topic."""
    for prefix, sign in ((ROOM_PREFIX, 1), (USER_PREFIX, -1)):
        digits = name.removeprefix(prefix)
        if digits != name and digits.isascii() and digits.isdecimal() and len(digits) <= 19:
            return sign * int(digits)
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule, as the file has it. Numbers are ranges (first, last), both included; texts are templates."""

    allow: bool
    actions: frozenset[str]
    ask: str = ""
    """The callback that decides in the place of `allow`; empty: none."""
    users: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    claims: Mapping[str, str] = field(default_factory=dict)
    rooms: tuple[tuple[int, int], ...] = ()
    topics: tuple[str, ...] = ()
    uins: tuple[tuple[int, int] | str, ...] = ()

    def is_for(self, identity: Identity) -> bool:
        """Whether it is about somebody: one of the users or groups named, and with every claim named."""
        named = not (self.users or self.groups) or identity.user in self.users or not self.groups.isdisjoint(identity.groups)
        return named and all(self._fits(identity.claims.get(name), value) for name, value in self.claims.items())

    def _fits(self, claim: str | None, value: str) -> bool:
        return claim == value or (claim == UNUSABLE and not self.allow)

    @property
    def has_templates(self) -> bool:
        """Whether it says something else for each login."""
        return any("{" in text for text in (*self.topics, *(item for item in self.uins if isinstance(item, str))))


OWN: Final = Rule(allow=True, actions=frozenset((SUBSCRIBE, INBOX, PRESENCE)), uins=("{uin}",))
"""Everybody's last rule: to receive what is sent to oneself."""


@dataclass(frozen=True, slots=True)
class _Filled:
    """A rule for one user."""

    decision: Decision
    actions: frozenset[str]
    everything: bool
    rooms: tuple[tuple[int, int], ...]
    topics: tuple[tuple[str, ...], ...]
    uins: tuple[tuple[int, int], ...]

    def covers(self, target: Target) -> bool:
        if self.everything:
            return True
        if isinstance(target, str):
            levels = target.split("/")
            return any(matches(filter_, levels) for filter_ in self.topics)
        ranges, number = (self.rooms, target) if target > 0 else (self.uins, -target)
        for low, high in ranges:  # noqa: SIM110 (a generator costs more than the look)
            if low <= number <= high:
                return True
        return False


class RuleSet:
    """The rules of a file, with `OWN` behind them, and what is the same for many logins: which are about them, and those without
    templates as they are."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        whole = (*rules, OWN)
        self._rules = [(number, rule, None if rule.has_templates else _filled(rule, {})) for number, rule in enumerate(whole, 1)]
        self._users = frozenset(user for rule in whole for user in rule.users)
        self._groups = frozenset(group for rule in whole for group in rule.groups)
        self._claims = sorted({name for rule in whole for name in rule.claims})
        self._chosen: dict[tuple[object, ...], list[tuple[int, Rule, _Filled | None]]] = {}

    def about(self, identity: Identity) -> list[tuple[int, Rule, _Filled | None]]:
        """The rules about a login, with their numbers from 1 on; None for those that are to be filled for it."""
        claims = tuple(identity.claims.get(name) for name in self._claims)
        kind = identity.user if identity.user in self._users else None, identity.groups & self._groups, claims
        found = self._chosen.get(kind)
        if found is None:
            if len(self._chosen) >= MAX_CHOICES:
                self._chosen.clear()
            found = self._chosen[kind] = [each for each in self._rules if each[1].is_for(identity)]
        return found


def _unanswered(callback: str, action: str, target: Target) -> bool | None:
    return None


class Permissions:
    """What one session may do.

    Args:
        identity: whose.
        rules: those of the file, with `OWN` behind them.
        client_id: of the session's client.
        answers: what a callback (its name), an action and a target are remembered with; None: nothing. Then it is a no, but for
            what the session was given before: a door has it `foresee` and asks first.

    Raises `NotAllowed` when a name of the session would change the meaning of a rule's template.
    """

    __slots__ = ("_answers", "_given", "_known", "_rules", "asks", "foreseen", "identity", "may_impersonate")

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
        found = [(number, filled or _filled(rule, names)) for number, rule, filled in rules.about(identity)]
        self._rules = [(number, rule) for number, rule in found if rule is not None]
        self.asks = any(isinstance(rule.decision, str) for _, rule in self._rules)
        """Whether a callback may have to be asked."""
        self.foreseen: dict[tuple[str, str, Target], None] = {}
        """What has to be asked: callback, action, target."""
        self._given: set[tuple[str, str, Target]] = set()
        """To what it subscribed by a callback's yes."""
        self._known: dict[tuple[str, Target], Decision] = {}
        self.may_impersonate = self.allows(IMPERSONATE, ALL)

    def allows(self, action: str, target: Target) -> bool:
        """Whether the session may do something to a target."""
        known = self._known.get((action, target))
        if known is None:
            known = self._decide(action, target)
        return known if known is True or known is False else self._by_callback(known, action, target)

    def foresee(self, action: str, target: Target) -> None:
        """It will be tried: what a callback must be asked for before is noted in `foreseen`."""
        decision = self._known.get((action, target))
        if decision is None:
            decision = self._first(action, target)
        if isinstance(decision, str) and len(self.foreseen) < MAX_REMEMBERED and self._answers(decision, action, target) is None:
            self.foreseen[decision, action, target] = None

    def keep(self, older: Permissions) -> None:
        """What the session has by callbacks' answers stays as long as the rules ask the same callback."""
        self._given = older._given

    def _by_callback(self, callback: str, action: str, target: Target) -> bool:
        question, answer = (callback, action, target), self._answers(callback, action, target)
        if answer is None:
            return question in self._given
        if not answer:
            self._given.discard(question)
        elif action in HELD and len(self._given) < MAX_REMEMBERED:
            self._given.add(question)
        return answer

    def seen(self, action: str, target: Target) -> bool:
        """Whether it was asked before, and is remembered: what is new is worth a line in the audit log."""
        return (action, target) in self._known

    def require(self, action: str, target: Target) -> None:
        """Raises `NotAllowed`, unless the session may do it."""
        if not self.allows(action, target):
            raise NotAllowed(f"this login may not {action} {name_of(target)}; `pixiu acl test` says which rule decides")

    def rule_of(self, action: str, target: Target) -> int:
        """Which rule decides, from 1 in the order of the file; `OWN` has the next number, 0: none does."""
        return next((number for number, rule in self._rules if action in rule.actions and rule.covers(target)), 0)

    def _first(self, action: str, target: Target) -> Decision:
        for _, rule in self._rules:
            if action in rule.actions and rule.covers(target):
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
    """A target as clients and callbacks name it: `room/42`, `user/7` or a free topic."""
    if isinstance(target, str):
        return target
    return f"{ROOM_PREFIX}{target}" if target > 0 else f"{USER_PREFIX}{-target}"


def name_of(target: Target) -> str:
    """A target as people name it."""
    if isinstance(target, str):
        return f"the topic {target[:80]!r}" if target != ALL else "anybody"
    return f"room {target}" if target > 0 else f"user {-target}"


def matches(filter_: Sequence[str], levels: Sequence[str]) -> bool:
    """Whether a filter, by levels, fits a topic's levels. `#` fits no topic that begins with `$`."""
    for index, level in enumerate(filter_):
        if level == "#":
            return not (index == 0 and levels[0].startswith("$"))
        if index >= len(levels) or not (level == levels[index] or (level == "+" and levels[index] != "#")):
            return False
    return len(filter_) == len(levels)


def _filled(rule: Rule, names: Mapping[str, str]) -> _Filled | None:
    """A rule with its templates filled. About a name that the session does not have an `allow` is None, and everything else denies
    whatever the name could have stood for."""
    if all(name in names for text in (*rule.topics, *rule.uins) if isinstance(text, str) for name in _TEMPLATE.findall(text)):
        decision: Decision = rule.ask or rule.allow
    elif rule.allow:
        return None
    else:
        decision = False
    topics = tuple(tuple(_fill(level, names) for level in topic.split("/")) for topic in rule.topics)
    uins = tuple(_range(_fill(item, names)) if isinstance(item, str) else item for item in rule.uins)
    return _Filled(decision, rule.actions, not (rule.rooms or rule.topics or rule.uins), rule.rooms, topics, uins)


def _fill(template: str, names: Mapping[str, str]) -> str:
    """A level, or a user, with its names; `ANY` where one of them is missing."""
    if any(name not in names for name in _TEMPLATE.findall(template)):
        return ANY

    def value(found: re.Match[str]) -> str:
        text = names[found[1]]
        if not text or _UNSAFE & set(text):
            raise NotAllowed(f"the {found[1]} of this login has no place in a rule's topic: it is empty or has # + / $ or NUL")
        return text

    return _TEMPLATE.sub(value, template)


def _range(text: str) -> tuple[int, int]:
    """Of users: one number that a template became, or all. What is none is about nobody."""
    if text == ANY:
        return 1, MAX_ID
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 19 else 0
    return (number, number) if 0 < number <= MAX_ID else (1, 0)


NOTHING: Final = Permissions(Identity("", 0), RuleSet((Rule(allow=False, actions=frozenset(ACTIONS)),)))
"""Of a session that is over."""
