"""Rules: the first that fits decides, templates are filled with names that cannot change them, what none allows is denied."""

from __future__ import annotations

import pytest

from cluster.access.rules import (
    ACTIONS,
    IMPERSONATE,
    INBOX,
    MAIL,
    MAX_CHOICES,
    MAX_GIVEN,
    MAX_REMEMBERED,
    PRESENCE,
    PUBLISH,
    SIGNAL,
    SUBSCRIBE,
    Permissions,
    RuleSet,
    Target,
    matches,
    of_topic_name,
    of_user,
)
from cluster.access.settings import parse
from cluster.trust.identity import Identity, claims_of
from pixiu.errors import ConfigurationError, NotAllowed

ALICE = Identity("alice", 7, frozenset({"players"}), {"tenant": "acme"})
SERVICE = Identity("billing", 0, frozenset({"services"}))
HEAD = '[jwt]\nkeys = "keys.json"\n'


def allowed(text: str, action: str, target: Target, identity: Identity = ALICE, client_id: str = "phone:1") -> bool:
    return Permissions(identity, rules_of(HEAD + text), client_id).allows(action, target)


def rules_of(text: str) -> RuleSet:
    return RuleSet(parse(text, "access.toml").rules)


def test_without_rules_somebody_receives_what_is_sent_to_him_and_nothing_else() -> None:
    permissions = Permissions(ALICE, RuleSet(()))
    mine = {action for action in ACTIONS if permissions.allows(action, of_user(7))}
    assert mine == {SUBSCRIBE, INBOX, PRESENCE}
    assert not any(permissions.allows(action, target) for action in ACTIONS for target in (of_user(8), 7, 42, "weather", "*"))
    assert not any(
        Permissions(SERVICE, RuleSet(())).allows(action, target) for action in ACTIONS for target in (of_user(7), 1, "a", "*")
    )


def test_the_first_rule_that_fits_decides() -> None:
    text = '[[rule]]\ndeny = ["publish"]\nrooms = ["13"]\n[[rule]]\nallow = ["publish"]\nrooms = ["1-100"]\n'
    assert [allowed(text, PUBLISH, room) for room in (1, 13, 100, 101)] == [True, False, True, False]
    assert not allowed(text, SUBSCRIBE, 1)
    assert not allowed('[[rule]]\ndeny = ["inbox"]\n', INBOX, of_user(7))


@pytest.mark.parametrize(
    ("who", "fits"),
    [
        ('users = ["alice"]', True),
        ('users = ["bob"]', False),
        ('groups = ["players", "staff"]', True),
        ('groups = ["staff"]', False),
        ('users = ["bob"]\ngroups = ["players"]', True),
        ('claims = { tenant = "acme" }', True),
        ('claims = { tenant = "other" }', False),
        ('groups = ["players"]\nclaims = { none = "x" }', False),
        ("", True),
    ],
)
def test_a_rule_is_for_users_groups_and_claims(who: str, fits: bool) -> None:
    assert allowed(f'[[rule]]\nallow = ["signal"]\n{who}\n', SIGNAL, 5) is fits


@pytest.mark.parametrize(
    ("filter_", "topic", "fits"),
    [
        ("a/{uin}/#", "a/7/b/c", True),
        ("a/{uin}/#", "a/7", True),
        ("a/{uin}/#", "a/8/b", False),
        ("{username}/+", "alice/x", True),
        ("{username}/+", "alice/x/y", False),
        ("d/{client_id}", "d/phone:1", True),
        ("t/{claim.tenant}/+", "t/acme/x", True),
        ("t/{claim.none}/+", "t/acme/x", False),
        ("#", "anything/at/all", True),
        ("#", "$SYS/x", False),
        ("+", "#", False),
        ("a/#", "a/+", True),
        ("a/b", "a/+", False),
    ],
)
def test_topics_by_filter_and_template(filter_: str, topic: str, fits: bool) -> None:
    assert allowed(f'[[rule]]\nallow = ["publish"]\ntopics = ["{filter_}"]\n', PUBLISH, topic) is fits


@pytest.mark.parametrize("name", ["#", "+", "a/b", "a\0b", "$SYS", "", "x#"])
def test_a_name_that_would_change_a_template_is_refused(name: str) -> None:
    text = HEAD + '[[rule]]\nallow = ["publish"]\ntopics = ["u/{username}/#"]\n'
    with pytest.raises(NotAllowed, match="username"):
        Permissions(Identity(name, 7), rules_of(text))
    text = HEAD + '[[rule]]\ndeny = ["publish"]\ntopics = ["u/{claim.who}"]\n'
    with pytest.raises(NotAllowed, match="who"):
        Permissions(Identity("bob", 7, claims={"who": name}), rules_of(text))


def test_a_client_without_a_name_is_not_in_rules_about_names() -> None:
    text = '[[rule]]\nallow = ["publish"]\ntopics = ["d/{client_id}"]\n'
    assert not allowed(text, PUBLISH, "d/", client_id="")
    with pytest.raises(NotAllowed):
        allowed(text, PUBLISH, "d/x", client_id="#")


@pytest.mark.parametrize("kind", ["deny", "ask"])
def test_a_rule_that_denies_or_asks_about_a_name_that_a_login_lacks_denies_all_that_it_could_stand_for(kind: str) -> None:
    head = '[callbacks.live]\nurl = "http://x"\n' if kind == "ask" else ""
    more = '\ncallback = "live"' if kind == "ask" else ""
    text = f'{head}[[rule]]\n{kind} = ["publish"]{more}\n%s\n[[rule]]\nallow = ["publish"]\n'
    devices = text % 'topics = ["devices/{client_id}/#"]'
    assert not allowed(devices, PUBLISH, "devices/d1/x", client_id="")
    assert allowed(devices, PUBLISH, "news/d1/x", client_id="")
    assert allowed(devices, PUBLISH, 42, client_id="")
    assert allowed(devices, PUBLISH, "devices/d2/x", client_id="d1")
    assert not allowed(text % 'topics = ["locked/x-{claim.none}"]', PUBLISH, "locked/x-9")
    assert not allowed(text % 'uins = ["{uin}"]', PUBLISH, of_user(9), SERVICE)


def test_a_claim_has_one_form_and_one_that_rules_cannot_use_is_denied() -> None:
    text = '[[rule]]\ndeny = ["publish"]\nclaims = { banned = true, level = 1 }\n[[rule]]\nallow = ["publish"]\n'

    def may(**claims: object) -> bool:
        return allowed(text, PUBLISH, 1, Identity("eve", 9, claims=claims_of(claims)))

    assert not may(banned=True, level=1.0)
    assert not may(banned="true", level="1")
    assert not may(banned=["a list"], level="x" * 257)
    assert may(banned=False, level=1)
    assert may(banned=None, level=1)
    only = '[[rule]]\nallow = ["publish"]\nclaims = { paid = true }\n'
    for value, fits in ((True, True), ("true", True), (1, False), ([True], False), ("true" * 100, False)):
        assert allowed(only, PUBLISH, 1, Identity("eve", 9, claims=claims_of({"paid": value}))) is fits


def test_a_claim_too_long_for_a_template_lets_nobody_around_it() -> None:
    text = '[[rule]]\ndeny = ["publish"]\ntopics = ["locked/{claim.tenant}/#"]\n[[rule]]\nallow = ["publish"]\n'
    tenant = "t" * 257
    with pytest.raises(NotAllowed, match="tenant"):
        allowed(text, PUBLISH, f"locked/{tenant}/x", Identity("eve", 9, claims=claims_of({"tenant": tenant})))


def test_logins_of_which_the_rules_see_the_same_share_what_was_filled() -> None:
    rules = rules_of(
        HEAD
        + '[[rule]]\nallow = ["publish"]\ngroups = ["a"]\nrooms = ["1-9"]\n'
        + '[[rule]]\nallow = ["publish"]\ngroups = ["b"]\nusers = ["eve"]\ntopics = ["x/{uin}"]\nclaims = { x = 5 }\n'
    )
    made = [Permissions(Identity(f"u{number}", number + 1, frozenset({"a", f"of {number}"})), rules) for number in range(50)]
    assert len({id(each._choice) for each in made}) == 1
    assert len(rules._chosen) == 1
    eve = Permissions(Identity("eve", 9, frozenset({"a"}), {"x": "5"}), rules)
    assert [eve.allows(PUBLISH, target) for target in (5, "x/9", "x/8")] == [True, True, False]
    for number in range(3 * MAX_CHOICES):
        rules.about(Identity("eve", 1, claims={"x": str(number)}), {"claim.x": str(number)})
        assert len(rules._chosen) <= MAX_CHOICES


def test_users_by_number_and_as_oneself() -> None:
    text = '[[rule]]\nallow = ["mail"]\nuins = ["{uin}", "100-200"]\n'
    assert [allowed(text, MAIL, of_user(uin)) for uin in (7, 8, 100, 200, 201)] == [True, False, True, True, False]
    assert not allowed(text, MAIL, 7)
    assert not allowed(text, MAIL, of_user(7), SERVICE)


def test_senders_are_left_to_those_alone_who_may_speak_for_others() -> None:
    assert not Permissions(ALICE, RuleSet(())).may_impersonate
    rules = rules_of(HEAD + '[[rule]]\nallow = ["impersonate"]\ngroups = ["services"]\n')
    assert Permissions(SERVICE, rules).may_impersonate
    assert not Permissions(ALICE, rules).may_impersonate


def test_answers_are_remembered_and_bounded() -> None:
    permissions = Permissions(ALICE, rules_of(HEAD + '[[rule]]\nallow = ["publish"]\n'))
    assert not permissions.seen(PUBLISH, 1)
    for room in range(1, 3 * MAX_REMEMBERED):
        assert permissions.allows(PUBLISH, room)
        assert permissions.seen(PUBLISH, room)
        assert len(permissions._known) <= MAX_REMEMBERED
    assert not permissions.allows(IMPERSONATE, "*")
    known = len(permissions._known)
    for number in range(100):  # a long name is decided anew, and kept nowhere
        assert permissions.allows(PUBLISH, f"{number}/" + "x" * 60_000)
    assert len(permissions._known) == known


def test_names_as_targets() -> None:
    assert [of_topic_name(name) for name in ("room/42", "user/7", "room/x", "weather/sz")] == [42, -7, "room/x", "weather/sz"]
    assert matches(("a", "+", "c"), ["a", "b", "c"], {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "nobody could log in"),
        ("x", "not TOML"),
        ("[jwt]\n", "[jwt] keys"),
        (HEAD + '[[rule]]\ndeny = ["publish"]\ntopics = ["private/{usrname}/#"]\n', "{username}"),
        (HEAD + '[[rule]]\ndeny = ["publish"]\ntopics = ["private/{}/#"]\n', "braces"),
        (HEAD + '[[rule]]\ndeny = ["publish"]\ntopics = ["private/{uin/#"]\n', "braces"),
        (HEAD + '[[rule]]\ndeny = ["publish"]\ntopics = ["room/13"]\n', "a free topic"),
        (HEAD + '[[rule]]\ndeny = ["publish"]\nuins = ["{uni}"]\n', "{uin}"),
        (HEAD + '[[rule]]\ndeny = ["publish"]\nclaims = { level = 1.5 }\n', "claims"),
        (HEAD + '[[rule]]\ndeny = ["publish"]\nclaims = { level = ["a"] }\n', "claims"),
        (HEAD + '[[rule]]\nallow = ["publish"]\nclaims = { level = "' + "x" * 257 + '" }\n', "256 bytes"),
        (HEAD + '[callback]\nurl = "http://x"\nfailures = 21\n', "[callback] failures"),
        ('[jwt]\nkeys = "a"\nalgorithms = ["none"]\n', "[jwt] algorithms"),
        ('[jwt]\nkeys = "a"\naudiense = "x"\n', "Did you mean audience?"),
        ('[jwt]\nkeys = "a"\nleeway_s = "x"\n', "[jwt] leeway_s"),
        ("[passwords]\n", "Did you mean password?"),
        ('[callback]\nurl = "ftp://x"\n', "[callback] url"),
        ("[callback]\n", "lacks"),
        (HEAD + "[[rule]]\n", "one of allow, deny and ask"),
        (HEAD + '[[rule]]\nallow = ["publish"]\ndeny = ["mail"]\n', "one of allow, deny and ask"),
        (HEAD + '[[rule]]\nallow = ["fly"]\n', "rule 1: allow"),
        (HEAD + '[[rule]]\nallow = ["publish"]\ntopic = ["a"]\n', "Did you mean topics?"),
        (HEAD + '[[rule]]\nallow = ["publish"]\ntopics = ["a/#/b"]\n', "filter"),
        (HEAD + '[[rule]]\nallow = ["publish"]\nrooms = ["9-1"]\n', "a number, a range"),
        (HEAD + '[[rule]]\nallow = ["publish"]\nrooms = [1]\n', "a list of texts"),
        (HEAD + '[[rule]]\nallow = ["publish"]\nuins = ["0"]\n', "a number, a range"),
        (HEAD + "[quota]\nsessions = 1\n", "quota"),
        (HEAD + "[quota]\nsessions_per_user = -1\n", "sessions_per_user"),
        (HEAD + "[quota]\ngroups = 1\n", "[quota] groups"),
    ],
)
def test_what_is_wrong_with_an_access_file_is_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text, "access.toml")
    assert str(caught.value).startswith("access.toml: ")
    assert problem in str(caught.value)


def test_a_group_has_a_quota_of_its_own_and_the_rest_of_the_common_one() -> None:
    settings = parse(HEAD + "[quota]\nsessions_per_user = 5\n[quota.groups.staff]\nmessages_per_s = 0\n", "x")
    assert settings.quota.sessions_per_user == 5
    assert (settings.group_quotas["staff"].sessions_per_user, settings.group_quotas["staff"].messages_per_s) == (5, 0)


ASK = '[callbacks.live]\nurl = "http://127.0.0.1:1/acl"\n[[rule]]\nask = ["subscribe", "publish"]\ncallback = "live"\n'


def test_a_callback_decides_where_its_rule_is_the_first_that_fits() -> None:
    answers: dict[Target, bool] = {}
    asked: list[tuple[str, str, Target]] = []

    def answer(callback: str, action: str, target: Target) -> bool | None:
        asked.append((callback, action, target))
        return answers.get(target)

    text = (
        ASK.replace("[[rule]]", '[[rule]]\ndeny = ["publish"]\nrooms = ["13"]\n[[rule]]')
        + 'rooms = ["1-1000"]\ntopics = ["live/{uin}"]\n'
    )
    permissions = Permissions(ALICE, rules_of(HEAD + text), "phone:1", answer)
    assert permissions.asks
    for target in (13, 999, "live/7", "live/8", of_user(7)):
        permissions.foresee(PUBLISH, target)
        permissions.foresee(SUBSCRIBE, target)
    wanted = [(PUBLISH, 999), (PUBLISH, "live/7"), (SUBSCRIBE, 13), (SUBSCRIBE, 999), (SUBSCRIBE, "live/7")]
    assert sorted(permissions.foreseen, key=str) == sorted((("live", *each) for each in wanted), key=str)
    assert not permissions.allows(PUBLISH, 999)  # what nobody has answered is a no
    answers |= {999: True, 13: True, "live/7": False}
    assert [permissions.allows(PUBLISH, target) for target in (13, 999, "live/7", "live/8")] == [False, True, False, False]
    assert permissions.allows(SUBSCRIBE, of_user(7))
    assert {callback for callback, _, _ in asked} == {"live"}


def test_what_a_session_was_given_by_a_callback_stays_its_own_until_the_callback_says_no() -> None:
    answers: dict[Target, bool] = {999: True}
    rules = rules_of(HEAD + ASK)
    permissions = Permissions(ALICE, rules, "", lambda _callback, _action, target: answers.get(target))
    assert permissions.allows(SUBSCRIBE, 999)
    assert permissions.allows(PUBLISH, 999)
    answers.clear()  # their time is over
    assert (permissions.allows(SUBSCRIBE, 999), permissions.allows(PUBLISH, 999)) == (True, False)
    later = Permissions(ALICE, rules, "", lambda _callback, _action, target: answers.get(target))
    later.keep(permissions)
    later.foresee(SUBSCRIBE, 999)
    for number in range(MAX_GIVEN):  # a later no counts even where there is space for nothing more
        later._given.add(("live", SUBSCRIBE, number + 1000))
    assert list(later.foreseen) == [("live", SUBSCRIBE, 999)]
    assert later.allows(SUBSCRIBE, 999)
    answers[999] = False
    assert not later.allows(SUBSCRIBE, 999)
    answers.clear()
    assert not later.allows(SUBSCRIBE, 999)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[[rule]]\nask = ["subscribe"]\n', "rule 1: callback"),
        ('[[rule]]\nask = ["subscribe"]\ncallback = "dead"\n', "rule 1: callback"),
        ('[[rule]]\nallow = ["subscribe"]\ncallback = "live"\n', "rule 1: callback"),
        ('[[rule]]\nask = ["impersonate"]\ncallback = "live"\n', "rule 1: ask"),
        ('[[rule]]\nask = ["publish"]\nallow = ["publish"]\n', "one of allow, deny and ask"),
        ('[callbacks.live]\nurl = "file:///etc/passwd"\n', r"\[callbacks.live\] url"),
        ('[callbacks.live]\nurl = "http://x"\ntimeout_s = 0\n', r"\[callbacks.live\] timeout_s"),
        ("[callbacks]\nlive = 3\n", r"\[callbacks\]"),
    ],
)
def test_what_is_wrong_with_a_callback_of_rules_is_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        parse(HEAD + text, "access.toml")


@pytest.mark.parametrize(
    ("filter_", "fits"),
    [
        ("home/kitchen/#", False),
        ("home/kitchen/light/#", True),
        ("home/+/heat", False),
        ("home/#", False),
        ("#", False),
        ("+/safe", False),
        ("home/safe", False),
        ("home/safe/#", False),
        ("home/+", False),
        ("garden/#", False),
        ("home/hall", True),
    ],
)
def test_a_filter_is_allowed_if_a_rule_covers_it_and_none_denies_any_of_it(filter_: str, fits: bool) -> None:
    text = (
        '[[rule]]\ndeny = ["subscribe"]\ntopics = ["home/safe/#", "home/+/heat"]\n'
        '[[rule]]\nallow = ["subscribe"]\ntopics = ["home/#"]\n'
    )  # fmt: skip
    assert allowed(text, SUBSCRIBE, filter_) is fits


def test_names_of_the_server_need_a_rule_of_their_own() -> None:
    everything = '[[rule]]\nallow = ["subscribe"]\ntopics = ["#"]\n'
    assert allowed(everything, SUBSCRIBE, "a/#")
    assert not allowed(everything, SUBSCRIBE, "$SYS/#")
    assert allowed('[[rule]]\nallow = ["subscribe"]\ntopics = ["$SYS/#"]\n', SUBSCRIBE, "$SYS/broker/+")
    denied = '[[rule]]\ndeny = ["subscribe"]\ntopics = ["+/x"]\n[[rule]]\nallow = ["subscribe"]\ntopics = ["$SYS/#"]\n'
    assert allowed(denied, SUBSCRIBE, "$SYS/#"), "a wildcard in the first level does not match them"


def test_a_grant_of_a_callback_is_forgotten_when_it_is_revoked() -> None:
    answers: dict[Target, bool | None] = {7: True, 8: True}

    def answer(_callback: str, _action: str, target: Target) -> bool | None:
        return answers.get(target)

    permissions = Permissions(Identity("ann", 7), rules_of(HEAD + ASK), "", answer)
    assert all(permissions.allows("subscribe", room) for room in (7, 8))
    answers.clear()
    assert all(permissions.allows("subscribe", room) for room in (7, 8)), "what is held stays allowed"
    permissions.forget("subscribe", 7)
    assert [permissions.allows("subscribe", room) for room in (7, 8)] == [False, True]
