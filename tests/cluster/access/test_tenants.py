"""Tenants: names in both directions, who belongs to one, what a login of one may do, limits, and bad configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.access.kicks import Kick
from cluster.access.login_guard import LoginGuard
from cluster.access.rules import (
    ACTIONS,
    ALL,
    IMPERSONATE,
    MAIL,
    PRODUCE,
    PUBLISH,
    REVOKE,
    SUBSCRIBE,
    Target,
    of_topic_name,
    of_user,
)  # fmt: skip
from cluster.access.tenants.book import TenantBook
from cluster.access.tenants.names import TenantNames
from cluster.access.tenants.settings import MAX_LABELS, OTHERS, AllTenants, TenantSettings
from cluster.access.tenants.use import QuotaReached, Stage, TenantUse
from cluster.trust.identity import Credentials, Identity
from pixiu.errors import ConfigurationError, NotAllowed, NotAuthenticated, PixiuError
from pixiu.ids import session_uin
from pixiu.placement.topics import Filter, TopicRefusal, destination, parse_filter
from tests.support.logins import Logins, all_visited

ACME = TenantSettings(uins="1000001-2000000", rooms="5001-6000")
GLOBEX = TenantSettings(uins="2000001-3000000", prefix="customers/globex")
TENANTS = """
[tenant.acme]
uins = "1000001-2000000"
rooms = "5001-6000"

[tenant.globex]
uins = "2000001-3000000"
prefix = "customers/globex"
"""
OPEN = '[[rule]]\nallow = ["publish", "subscribe", "mail", "produce"]\n'


@pytest.fixture
def acme() -> TenantNames:
    return TenantNames("acme", ACME)


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ("a/b", "acme/a/b"),
        ("room", "acme/room"),
        ("/a", "acme//a"),
        ("room/7", "room/5007"),
        ("room/1000", "room/6000"),
        ("user/7", "user/1000007"),
        ("$SYS/broker/uptime", "$SYS/tenant/acme/broker/uptime"),
    ],
)
def test_a_topic_has_one_name_inside_and_one_outside(acme: TenantNames, inside: str, outside: str) -> None:
    assert acme.outward(inside) == outside
    assert acme.text_inward(outside) == inside


@pytest.mark.parametrize(
    ("inside", "outside"),
    [("#", "acme/#"), ("+/b", "acme/+/b"), ("$share/g/a/+", "$share/g/acme/a/+"), ("$share/g/room/7", "$share/g/room/5007"),
     ("$SYS/#", "$SYS/tenant/acme/#"), ("", "")],
)  # fmt: skip
def test_a_filter_matches_within_the_tenant_only(acme: TenantNames, inside: str, outside: str) -> None:
    assert acme.outward(inside) == outside


@pytest.mark.parametrize(
    "name",
    ["room/1001", "room/0", "user/1000001", "user/0", "$SYS", "$other/a", "$share/g", "$share/g/user/7", "room/+", "user/#",
     "$share/g/room/1001"],
)  # fmt: skip
def test_a_name_that_the_tenant_does_not_have_becomes_nobodys(acme: TenantNames, name: str) -> None:
    found = parse_filter(acme.outward(name))
    assert isinstance(found, TopicRefusal) or (isinstance(found, Filter) and found.name.startswith("acme/")), found


def test_a_tenant_without_rooms_has_none() -> None:
    assert isinstance(destination(TenantNames("globex", GLOBEX).outward("room/1")), TopicRefusal)


@pytest.mark.parametrize(
    "name", ["globex/a", "acme", "acmes/a", "acme/$SYS/a", "acme/room/5", "acme/user/5", "room/5000", "user/1000000", "room/6001",
             "$SYS/broker/uptime", "$SYS/tenant/globex/a"],
)  # fmt: skip
def test_a_topic_of_somebody_else_has_no_name_inside(acme: TenantNames, name: str) -> None:
    assert acme.inward(name.encode()) == b""


@pytest.mark.parametrize(
    ("action", "target", "inside"),
    [
        (PUBLISH, "acme/a", "a"),
        (SUBSCRIBE, "acme/#", "#"),
        (SUBSCRIBE, "#", None),
        (SUBSCRIBE, "+/a", None),
        (PUBLISH, ALL, None),
        (PUBLISH, "globex/a", None),
        (PUBLISH, "acme/room/5", None),
        (PUBLISH, 5007, 7),
        (PUBLISH, 7, None),
        (MAIL, of_user(1000007), of_user(7)),
        (MAIL, of_user(7), None),
        (PRODUCE, "acme.orders", "orders"),
        (PRODUCE, "orders", None),
        (PRODUCE, "acme.", None),
        (REVOKE, ALL, ALL),
        (IMPERSONATE, ALL, None),
    ],
)
def test_what_is_beyond_the_tenant_has_no_target_inside(
    acme: TenantNames, action: str, target: Target, inside: Target | None
) -> None:
    assert acme.target_inward(action, target) == inside


def book(**tenants: TenantSettings) -> TenantBook:
    found = TenantBook(lambda: 0.0)
    found.use(AllTenants(), tenants or {"acme": ACME, "globex": GLOBEX}, {})
    return found


def test_two_tenants_may_have_users_of_one_name_and_one_number() -> None:
    of = [book().place(Identity("alice", 7, claims={"tenant": name}, by="jwt")) for name in ("acme", "globex")]
    assert [(each.user, each.uin, each.tenant, each.name) for each in of] == [
        ("acme/alice", 1000007, "acme", "alice"), ("globex/alice", 2000007, "globex", "alice")
    ]  # fmt: skip
    assert session_uin(of[0].uin, "phone") != session_uin(of[1].uin, "phone")


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        (Identity("alice", 7, claims={"tenant": "initech"}, by="jwt"), "does not have"),
        (Identity("acme/alice", 7, by="jwt"), "does not name the tenant"),
        (Identity("acme/", 7, by="password"), "does not name the tenant"),
        (Identity("alice", 1000007, by="jwt"), "UIN is that of a tenant"),
        (Identity("alice", 1_000_001, claims={"tenant": "acme"}, by="jwt"), "beyond those of its tenant, 1 to 1000000"),
    ],
)
def test_a_login_that_belongs_nowhere_is_refused(identity: Identity, why: str) -> None:
    with pytest.raises(NotAuthenticated, match=why):
        book().place(identity)


@pytest.mark.parametrize("by", ["password", "certificate", "callback"])
def test_a_user_name_names_the_tenant_where_no_issuer_lets_users_choose_it(by: str) -> None:
    assert book().place(Identity("acme/alice", 7, by=by)).tenant == "acme"
    assert book().place(Identity("other/alice", 7, by=by)).tenant == ""


def test_a_login_without_a_tenant_may_be_refused() -> None:
    found = TenantBook(lambda: 0.0)
    found.use(AllTenants(required=True), {"acme": ACME}, {})
    with pytest.raises(NotAuthenticated, match="the claim tenant"):
        found.place(Identity("alice", 7, by="jwt"))


@pytest.fixture
def logins(tmp_path: Path) -> Logins:
    return Logins(tmp_path)


@pytest.fixture
async def make(guards: Callable[[str], LoginGuard], logins: Logins) -> Callable[[str], LoginGuard]:
    return lambda rules: guards(f'[jwt]\nkeys = "keys.json"\n[password]\nfile = "users"\n{rules}')


async def opened(guard: LoginGuard, logins: Logins, user: str, uin: int, tenant: str, **claims: Any) -> Any:
    token = logins.token(user, uin, tenant=tenant or None, **claims)
    identity = await guard.check(Credentials("", token, "phone", "10.0.0.9"))
    return guard.open(identity, "10.0.0.9", "phone", lambda _why: None)


async def test_rules_are_in_the_tenants_names_and_reach_no_further(make: Callable[[str], LoginGuard], logins: Logins) -> None:
    rules = '[[rule]]\nallow = ["publish"]\ntopics = ["own/{username}/{uin}"]\nrooms = ["1-10"]\n' + OPEN
    guard = make(TENANTS + rules)
    of_acme = await opened(guard, logins, "alice", 7, "acme")
    assert of_acme.permissions.rule_of(PUBLISH, "acme/own/alice/7") == 1
    assert of_acme.permissions.rule_of(PUBLISH, 5003) == 1
    assert of_acme.allows(PUBLISH, "acme/any")
    for topic in ("customers/globex/a", "own/alice/7", "#", "room/3", "user/7", "user/2000007"):
        assert not of_acme.allows(SUBSCRIBE, of_topic_name(topic)), topic
    operator = await opened(guard, logins, "root", 1, "")
    assert operator.allows(SUBSCRIBE, "#")
    assert not any(of_acme.allows(action, ALL) for action in ACTIONS if action != REVOKE)
    assert not of_acme.permissions.may_impersonate
    for session in (of_acme, operator):
        session.close()


async def test_a_tenant_may_have_rules_of_its_own(make: Callable[[str], LoginGuard], logins: Logins) -> None:
    (logins.folder / "acme.toml").write_text('[[rule]]\nallow = ["publish"]\ntopics = ["news/#"]\n')
    guard = make(TENANTS.replace("[tenant.acme]", '[tenant.acme]\nrules = "acme.toml"') + OPEN)
    of_acme, of_globex = await opened(guard, logins, "a", 7, "acme"), await opened(guard, logins, "a", 7, "globex")
    assert of_acme.allows(PUBLISH, "acme/news/1")
    assert not of_acme.allows(PUBLISH, "acme/other")
    assert of_globex.allows(PUBLISH, "customers/globex/other")
    (logins.folder / "acme.toml").write_text('[[rule]]\nallow = ["publish"]\ntopics = ["other"]\n')
    await guard.read_again()
    await guard.read_again()
    assert of_acme.allows(PUBLISH, "acme/other")
    assert not of_acme.allows(PUBLISH, "acme/news/1")
    for session in (of_acme, of_globex):
        session.close()


@pytest.mark.parametrize(
    ("tenants", "ended"),
    [
        (TENANTS, []),
        (TENANTS.replace('rooms = "5001-6000"', 'rooms = "5001-6000"\nmessages_in_per_s = 5'), []),
        (TENANTS.replace("1000001-2000000", "4000001-5000000"), ["acme"]),
        (TENANTS.split("[tenant.globex]")[0], ["globex"]),
        (f"{TENANTS}\n[tenants]\nrequired = true\n", [""]),
        (TENANTS.replace("2000001-3000000", "1-1000").replace("1000001", "1001"), ["", "acme", "globex"]),
    ],
)
async def test_a_change_ends_the_sessions_whose_names_mean_something_else(
    make: Callable[[str], LoginGuard], logins: Logins, tenants: str, ended: list[str]
) -> None:
    guard = make(TENANTS + OPEN)
    over: list[str] = []
    sessions = [await opened(guard, logins, "alice", 7, tenant) for tenant in ("acme", "globex", "")]
    for session in sessions:
        session.end = lambda _why, session=session: over.append(session.identity.tenant)
    make(tenants + OPEN)  # writes the file
    await guard.read_again()
    await guard.read_again()
    await all_visited(guard)
    assert sorted(over) == ended
    for session in sessions:
        session.close()


async def test_an_operator_ends_the_sessions_of_one_tenant(make: Callable[[str], LoginGuard], logins: Logins) -> None:
    guard = make(TENANTS + OPEN)
    sessions = [await opened(guard, logins, "alice", 7, tenant) for tenant in ("acme", "globex", "")]
    assert guard.kick(Kick(tenant="acme").text()) == 1
    assert [bool(session.over) for session in sessions] == [True, False, False]
    for session in sessions:
        session.close()


async def test_sessions_of_a_tenant_have_a_bound(make: Callable[[str], LoginGuard], logins: Logins) -> None:
    guard = make(TENANTS.replace("[tenant.acme]", "[tenant.acme]\nconnections = 1") + OPEN)
    first = await opened(guard, logins, "alice", 7, "acme")
    with pytest.raises(QuotaReached, match="acme has 1 sessions"):
        await opened(guard, logins, "bob", 8, "acme")
    (await opened(guard, logins, "alice", 7, "globex")).close()
    first.close()
    (await opened(guard, logins, "bob", 8, "acme")).close()


async def test_what_one_user_publishes_is_charged_to_the_tenant(make: Callable[[str], LoginGuard], logins: Logins) -> None:
    guard = make(TENANTS.replace("[tenant.acme]", "[tenant.acme]\nmessages_in_per_s = 10") + "[quota]\nmessages_per_s = 0\n" + OPEN)
    alice, bob = await opened(guard, logins, "alice", 7, "acme"), await opened(guard, logins, "bob", 8, "acme")
    other = await opened(guard, logins, "alice", 7, "globex")
    assert alice.spend(30, 0) > 1.0
    assert bob.owed() > 1.0
    assert not other.owed()
    for session in (alice, bob, other):
        session.close()


def test_qos_0_is_dropped_above_the_rate_and_in_a_stage_and_the_rest_makes_debt() -> None:
    use = TenantUse(replace(ACME, messages_out_per_s=2.0), TenantNames("acme", ACME), "acme", 0.0)
    assert [use.take_out(qos, 10, 0.0) for qos in (0, 0, 0, 1, 0)] == [True, True, False, True, False]
    assert [use.take_out(0, 10, now) for now in (0.4, 0.6)] == [False, True]
    use.stage = Stage.NO_QOS_0
    assert [use.take_out(qos, 10, 100.0) for qos in (0, 1)] == [False, True]
    assert (use.counters.messages_out, use.counters.dropped_out) == (5, 4)


def test_retained_messages_have_a_bound_that_clearing_does_not_meet() -> None:
    use = TenantUse(replace(ACME, retained_messages=2, retained_bytes=100), TenantNames("acme", ACME), "acme", 0.0)
    assert [use.take_retained(size) for size in (60, 60, 40, 1, 0)] == [True, False, True, False, True]
    use.retained.messages = use.retained.bytes = 0  # as routers counted
    assert use.take_retained(1)
    assert TenantUse(ACME, TenantNames("acme", ACME), "acme", 0.0).take_retained(1 << 40)


def test_the_first_tenants_have_labels_and_the_others_share_one() -> None:
    size = 10
    tenants = {f"t{number}": TenantSettings(uins=f"{size * number + 1}-{size * number + size}") for number in range(MAX_LABELS + 3)}
    found = book(**tenants)
    for used in found:
        used.sessions = 1
    samples = found.samples()["tenant_sessions{tenant}"]
    assert isinstance(samples, dict)
    assert (len(samples), samples["t0"], samples[OTHERS]) == (MAX_LABELS + 1, 1, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tenant.acme]\n", r"\[tenant.acme\]: lacks uins"),
        ('[tenant.acme]\nuins = ""\n', r'\[tenant.acme\] uins = "": must be a range such as'),
        ('[tenant.acme]\nuins = "7"\n', "must be a range"),
        ('[tenant.acme]\nuins = "9-1"\n', "must be a range"),
        ('[tenant.acme]\nuins = "1-9223372036854775808"\n', "from 1 to 9223372036854775807"),
        ('[tenant.acme]\nuins = "1-9"\nrooms = "1-9223372036854775807"\n', r"rooms = .* from 1 to 4611686018427387903"),
        (
            '[tenant.a]\nuins = "1-9"\n[tenant.b]\nuins = "9-20"\n',
            r"\[tenant.b\] uins = .*: must be apart from those of the tenant a",
        ),
        ('[tenant.a]\nuins = "1-9"\n[tenant.b]\nuins = "10-20"\nprefix = "a/b"\n', "must be apart from that of the tenant a, a"),
        ('[tenant.a]\nuins = "1-9"\nprefix = "a/b"\n[tenant.b]\nuins = "10-20"\nprefix = "a"\n', "neither may be below the other"),
        ('[tenant.a]\nuins = "1-9"\nprefix = "a/#"\n', "without wildcards"),
        ('[tenant.a]\nuins = "1-9"\nprefix = "a/"\n', "empty levels"),
        ('[tenant.a]\nuins = "1-9"\nprefix = "room/5"\n', "not below room or user"),
        ('[tenant.a]\nuins = "1-9"\nprefix = "$SYS"\n', "must be a topic"),
        ('[tenant."a/b"]\nuins = "1-9"\n', 'tenant = "a/b": must be named by 1 to 32 letters'),
        ('[tenant.a]\nuins = "1-9"\nweight = 0\n', r"\[tenant.a\] weight = 0.0: must be above 0"),
        ('[tenant.a]\nuins = "1-9"\nconections = 5\n', "connections"),
        ('[tenant.a]\nuins = "1-9"\nconnections = "many"\n', r"\[tenant.a\] connections = .*: must be an integer"),
        ('[tenant.a]\nuins = "1-9"\nrules = "gone.toml"\n', "gone.toml"),
        ('[tenant.a]\nuins = "1-9"\nrules = "keys.json"\n', "not TOML"),
        ("tenant = 5\n", r"must be a table, \[tenant\]"),
        ('[tenants]\nrequired = "yes"\n', r"\[tenants\] required = .*: must be true or false"),
    ],
)
async def test_bad_configuration_is_named(make: Callable[[str], LoginGuard], text: str, said: str) -> None:
    top, tables = (text, "") if text.startswith("tenant =") else ("", text)
    with pytest.raises(ConfigurationError, match=said):
        if top:
            from cluster.access.settings import parse

            parse(f'{top}[password]\nfile = "users"\n', "access.toml")
        else:
            make(tables)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[rule]]\nallow = ["impersonate"]\n', "acme.toml: rule 1: impersonate: a tenant's logins may not"),
        ('[jwt]\nkeys = "k"\n', "acme.toml: .*jwt.*the access file has everything else"),
        ('[[rule]]\nallow = ["fly"]\n', "acme.toml: rule 1: allow"),
        ('[[rule]]\nask = ["publish"]\ncallback = "live"\n', "callbacks.NAME"),
    ],
)
async def test_bad_rules_of_a_tenant_are_named(make: Callable[[str], LoginGuard], logins: Logins, text: str, said: str) -> None:
    (logins.folder / "acme.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        make('[tenant.acme]\nuins = "1-9"\nrules = "acme.toml"\n')


async def test_without_tenants_nothing_is_translated(make: Callable[[str], LoginGuard], logins: Logins) -> None:
    guard = make(OPEN)
    session = await opened(guard, logins, "acme/alice", 7, "acme")
    assert (session.identity.user, session.identity.uin, session.tenant) == ("acme/alice", 7, None)
    session.close()
    for error in (NotAllowed, QuotaReached):
        assert issubclass(error, PixiuError)
