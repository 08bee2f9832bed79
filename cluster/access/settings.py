"""The access file: accepted logins, their permissions, and their limits. Pure.

Source: docs/security.md, "The access file".
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from cluster.access.certificates import NAMES, CertificateSettings
from cluster.access.decisions import WINDOW
from cluster.access.rules import ACTIONS, IMPERSONATE, MAX_RULES, REVOKE, AccessRule
from cluster.access.tenants.settings import MAX_TENANTS, AllTenants, TenantSettings, problems
from cluster.access.tokens import ALGORITHMS, TokenSettings
from cluster.settings.fields import show, unknown
from cluster.trust.identity import UNUSABLE, text_of_claim
from pixiu.errors import ConfigurationError
from pixiu.ids import MAX_ID, MAX_ROOM
from pixiu.placement.topics import ROOM_PREFIX, USER_PREFIX, is_filter

TABLES: Final = ("jwt", "password", "callback", "callbacks", "certificate", "quota", "rule", "tenants", "tenant")
RULE_KEYS: Final = ("allow", "deny", "ask", "callback", "users", "groups", "claims", "rooms", "topics", "uins")
ASKED: Final = tuple(action for action in ACTIONS if action not in (IMPERSONATE, REVOKE))
"""Actions that callbacks decide on: impersonation is a property of the login, and known from the beginning."""
MAX_CALLBACKS: Final = 100
_RANGE: Final = re.compile(r"([0-9]{1,19})(?:-([0-9]{1,19}))?")
_NAME: Final = r"\{(?:uin|username|client_id|claim\.[A-Za-z_][A-Za-z0-9_.-]*)\}"
_WITH_NAMES: Final = re.compile(rf"(?:[^{{}}]|{_NAME})+")
_ONE_NAME: Final = re.compile(_NAME)
NAMES_OF_RULES: Final = "{uin}, {username}, {client_id} or {claim.NAME}"
MAX_ITEMS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackSettings:
    """A service asked by HTTP, and the memory for its answers."""

    url: str
    timeout_s: float = 2.0
    """Time-out of one answer, seconds."""
    at_once: int = 64
    """Simultaneous questions; more are refused."""
    cache_s: float = 60.0
    """Seconds for which a yes is remembered."""
    refused_s: float = 5.0
    """Seconds for which a no is remembered."""
    cached: int = 100_000
    """Number of remembered answers."""
    failures: int = 10
    """Failures among the last 20 questions, from at least 3 addresses, after which nothing is asked."""
    open_s: float = 5.0
    """Seconds for which nothing is asked then."""
    max_session_s: float = 86_400.0
    """Seconds after which a session ends, and the service is asked anew, whatever its answer was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one user, or one address, at one process. 0: no limit."""

    sessions_per_user: int = 1000
    sessions_per_address: int = 20_000
    failed_logins_per_min: int = 120
    """Failed logins of one address; beyond this logins are refused without a check."""
    messages_per_s: float = 2_000
    """Messages published by one user, a mail once for each receiver; beyond this the user's clients are read more slowly."""
    bytes_per_s: float = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Content of an access file. `keys` and `users` are paths as in the file; empty: no such authenticator."""

    keys: str = ""
    tokens: TokenSettings = field(default_factory=TokenSettings)
    users: str = ""
    callback: CallbackSettings | None = None
    callbacks: Mapping[str, CallbackSettings] = field(default_factory=dict)
    """Callbacks for rules, by name."""
    certificate: CertificateSettings | None = None
    quota: Quota = field(default_factory=Quota)
    group_quotas: Mapping[str, Quota] = field(default_factory=dict)
    rules: tuple[AccessRule, ...] = ()
    all_tenants: AllTenants = field(default_factory=AllTenants)
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)
    """By name."""


def parse(text: str, name: str) -> AccessSettings:
    """Parse an access file. Raises `ConfigurationError` that names the file, the key and the allowed values."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{name}: not TOML: {error}") from None
    for table in tables:
        if table not in TABLES:
            raise ConfigurationError(f"{name}: {unknown('table', table, TABLES)}")
    keys, tokens = "", TokenSettings()
    if "jwt" in tables:
        found = _table(tables, "jwt", name)
        keys = _text(found.pop("keys", None), name, "[jwt] keys", "the path of a JWKS or PEM file")
        tokens = _made(TokenSettings, found, name, "jwt")
        if not tokens.algorithms or not set(tokens.algorithms) <= set(ALGORITHMS):
            raise _wrong(name, "[jwt] algorithms", tokens.algorithms, f"some of {', '.join(ALGORITHMS)}")
    users = ""
    if "password" in tables:
        found = _table(tables, "password", name)
        users = _text(found.pop("file", None), name, "[password] file", "the path of a file that `pixiu passwd` writes")
        _no_more(found, ("file",), name, "password")
    callback = None
    if "callback" in tables:
        callback = _callback(_table(tables, "callback", name), name, "callback")
    asked = _table(tables, "callbacks", name) if "callbacks" in tables else {}
    if len(asked) > MAX_CALLBACKS or not all(isinstance(item, dict) for item in asked.values()):
        raise _wrong(name, "[callbacks]", list(asked), f"at most {MAX_CALLBACKS} tables, [callbacks.NAME]")
    callbacks = {key: _callback(item, name, f"callbacks.{key}") for key, item in asked.items()}
    certificate = _certificate(_table(tables, "certificate", name), name) if "certificate" in tables else None
    if not (keys or users or callback or certificate):
        raise ConfigurationError(f"{name}: needs a table [jwt], [password], [callback] or [certificate], else nobody could log in")
    quota = _table(tables, "quota", name) if "quota" in tables else {}
    groups = quota.pop("groups", {})
    if not isinstance(groups, dict) or not all(isinstance(item, dict) for item in groups.values()):
        raise _wrong(name, "[quota] groups", groups, "tables, [quota.groups.NAME]")
    whole = _made(Quota, quota, name, "quota")
    by_group = {group: _made(Quota, {**quota, **item}, name, f"quota.groups.{group}") for group, item in groups.items()}
    every = _made(AllTenants, _table(tables, "tenants", name) if "tenants" in tables else {}, name, "tenants")
    return AccessSettings(
        keys=keys, tokens=tokens, users=users, callback=callback, certificate=certificate, quota=whole, group_quotas=by_group,
        rules=_rules(tables, name, callbacks), callbacks=callbacks, all_tenants=every, tenants=_tenants(tables, name),
    )  # fmt: skip


def parse_rules(text: str, name: str, callbacks: Mapping[str, CallbackSettings]) -> tuple[AccessRule, ...]:
    """Rules of a tenant's own file. Raises `ConfigurationError`. `callbacks`: of the access file."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{name}: not TOML: {error}") from None
    for table in tables:
        if table != "rule":
            raise ConfigurationError(f"{name}: {unknown('table', table, ('rule',))}; the access file has everything else")
    rules = _rules(tables, name, callbacks)
    for number, rule in enumerate(rules, 1):
        if IMPERSONATE in rule.actions:
            raise ConfigurationError(f"{name}: rule {number}: {IMPERSONATE}: a tenant's logins may not, whatever its rules say")
    return rules


def _tenants(tables: Mapping[str, Any], name: str) -> dict[str, TenantSettings]:
    found = _table(tables, "tenant", name) if "tenant" in tables else {}
    if len(found) > MAX_TENANTS or not all(isinstance(item, dict) for item in found.values()):
        raise _wrong(name, "[tenant]", list(found)[:10], f"at most {MAX_TENANTS} tables, [tenant.NAME]")
    made = {key: _made(TenantSettings, item, name, f"tenant.{key}") for key, item in found.items()}
    for where, value, allowed in problems(made):
        raise _wrong(name, where, value, allowed)
    return made


def _callback(found: Mapping[str, Any], name: str, where: str) -> CallbackSettings:
    made = _made(CallbackSettings, found, name, where)
    if not _is_url(made.url):
        raise _wrong(name, f"[{where}] url", made.url, "an http or https address")
    for key in ("timeout_s", "at_once", "cached", "failures", "max_session_s"):
        if not getattr(made, key):
            raise _wrong(name, f"[{where}] {key}", getattr(made, key), "above 0")
    if made.failures > WINDOW:
        raise _wrong(name, f"[{where}] failures", made.failures, f"at most {WINDOW}, the number of latest questions that count")
    return made


def _certificate(found: dict[str, Any], name: str) -> CertificateSettings:
    uins = found.pop("uins", {})
    if not isinstance(uins, dict) or not all(type(uin) is int and 0 < uin <= MAX_ID for uin in uins.values()):
        raise _wrong(name, "[certificate] uins", uins, "a table, [certificate.uins], of users and UINs")
    settings = replace(_made(CertificateSettings, found, name, "certificate"), uins=uins)
    if settings.name not in NAMES:
        raise _wrong(name, "[certificate] name", settings.name, f"one of {', '.join(NAMES)}")
    try:
        settings.pattern()
    except ValueError:
        raise _wrong(
            name, "[certificate] template", settings.template, "a text with {user}, {uin} or {group}, each once at most"
        ) from None
    return settings


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _rules(tables: Mapping[str, Any], name: str, callbacks: Mapping[str, CallbackSettings]) -> tuple[AccessRule, ...]:
    found = tables.get("rule", [])
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found) or len(found) > MAX_RULES:
        raise ConfigurationError(f"{name}: rule: must be at most {MAX_RULES} tables, [[rule]]")
    return tuple(_rule(item, name, f"rule {number}", callbacks) for number, item in enumerate(found, 1))


def _rule(item: Mapping[str, Any], name: str, where: str, callbacks: Mapping[str, CallbackSettings]) -> AccessRule:
    _no_more(item, RULE_KEYS, name, where)
    said = [key for key in ("allow", "deny", "ask") if key in item]
    if len(said) != 1:
        raise ConfigurationError(f"{name}: {where}: must have one of allow, deny and ask, a list of: {', '.join(ACTIONS)}")
    known = ASKED if said == ["ask"] else ACTIONS
    actions, callback = _texts(item, said[0], name, where), item.get("callback", "")
    if not actions or not set(actions) <= set(known):
        raise _wrong(name, f"{where}: {said[0]}", actions, f"some of: {', '.join(known)}")
    if (callback not in callbacks) if said == ["ask"] else callback:
        raise _wrong(name, f"{where}: callback", callback, "given with ask, the NAME of a table [callbacks.NAME]")
    topics = _texts(item, "topics", name, where)
    for topic in topics:
        if not topic or not is_filter(topic):
            raise _wrong(name, f"{where}: topics", topic, "a topic or filter; + and # stand alone in their level, # last")
        if not _WITH_NAMES.fullmatch(topic):
            raise _wrong(name, f"{where}: topics", topic, f"a topic in which braces enclose only names: {NAMES_OF_RULES}")
        if topic.startswith((ROOM_PREFIX, USER_PREFIX)):
            raise _wrong(name, f"{where}: topics", topic, "a free topic; a room or a user is named by rooms or uins")
    claims = item.get("claims", {})
    if not isinstance(claims, dict) or any(isinstance(v, float) or text_of_claim(v) == UNUSABLE for v in claims.values()):
        raise _wrong(name, f"{where}: claims", claims, "a table of texts (at most 256 bytes), integers, true and false")
    rooms = tuple(_range(text, MAX_ROOM, name, f"{where}: rooms") for text in _texts(item, "rooms", name, where))
    uins = tuple(
        text if _ONE_NAME.fullmatch(text) else _range(text, MAX_ID, name, f"{where}: uins", f", or {NAMES_OF_RULES}")
        for text in _texts(item, "uins", name, where)
    )
    return AccessRule(
        allow="allow" in item, actions=frozenset(actions), ask=callback, users=frozenset(_texts(item, "users", name, where)),
        groups=frozenset(_texts(item, "groups", name, where)), claims={key: text_of_claim(value) for key, value in claims.items()},
        rooms=rooms, topics=tuple(topics), uins=uins,
    )  # fmt: skip


def _range(text: str, highest: int, name: str, where: str, more: str = "") -> tuple[int, int]:
    if text == "*":
        return 1, highest
    found = _RANGE.fullmatch(text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < low <= high <= highest:
        raise _wrong(name, where, text, f'a number, a range such as "1-1000", or "*"{more}')
    return low, high


Made = TypeVar("Made")


def _made(kind: type[Made], values: Mapping[str, Any], name: str, where: str) -> Made:
    """Make a dataclass of numbers, texts and lists from a table."""
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    _no_more(values, tuple(known), name, where)
    given: dict[str, Any] = {}
    for key, value in values.items():
        like = str(known[key].type)
        if like in ("int", "float") and isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 53:
            given[key] = int(value) if like == "int" else float(value)
        elif like == "bool" and isinstance(value, bool):
            given[key] = bool(value)
        elif like == "str" and isinstance(value, str) and len(value) <= 4096 and value.isprintable():
            given[key] = value
        elif like.startswith("tuple") and isinstance(value, list) and all(isinstance(text, str) for text in value):
            given[key] = tuple(value)
        else:
            raise _wrong(
                name,
                f"[{where}] {key}",
                value,
                {"str": "a text", "int": "an integer", "float": "a number", "bool": "true or false"}.get(like, "a list"),
            )
    try:
        return kind(**given)
    except TypeError:
        needed = {key for key, item in known.items() if item.default is MISSING and item.default_factory is MISSING}
        raise ConfigurationError(f"{name}: [{where}]: lacks {', '.join(sorted(needed - given.keys()))}") from None


def _table(tables: Mapping[str, Any], table: str, name: str) -> dict[str, Any]:
    found = tables[table]
    if not isinstance(found, dict):
        raise ConfigurationError(f"{name}: {table}: must be a table, [{table}]")
    return dict(found)


def _text(value: object, name: str, key: str, allowed: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise _wrong(name, key, value, allowed)
    return value


def _texts(item: Mapping[str, Any], key: str, name: str, where: str) -> list[str]:
    found = item.get(key, [])
    if not isinstance(found, list) or len(found) > MAX_ITEMS or not all(isinstance(text, str) for text in found):
        raise _wrong(name, f"{where}: {key}", found, "a list of texts")
    return found


def _no_more(values: Mapping[str, Any], known: tuple[str, ...], name: str, where: str) -> None:
    for key in values:
        if key not in known:
            raise ConfigurationError(f"{name}: {where}: {unknown('key', key, known)}")


def _wrong(name: str, key: str, value: object, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{name}: {key} = {show(value)}: must be {allowed}")
