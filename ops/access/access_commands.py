"""`pixiu passwd`, `token`, `acl` and `kick`: who may log in, and what each may do.

Source: docs/security.md.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from pixiu.discovery import paths
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID
from registry.mailbox import posted
from registry.session import registry_of
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, guarded, print_json, print_text

KICK_S: Final = 2.0
"""Seconds for which a request to end sessions stays in the registry."""

User = Annotated[str, typer.Argument(help="The user's name.", metavar="USER")]
Uin = Annotated[int, typer.Option(help="The user's UIN; 0: a service.", min=0, max=MAX_ID)]
Groups = Annotated[list[str] | None, typer.Option("--group", help="A group of the user; may be repeated.", metavar="GROUP")]

Claims = Annotated[
    list[str] | None, typer.Option("--claim", help="A claim of the login; may be repeated.", metavar="NAME=VALUE")
]  # fmt: skip
RESERVED: Final = ("sub", "uin", "groups", "aud", "exp", "iat", "nbf")
"""Claims of a token that have options of their own."""

acl = typer.Typer(name="acl", help="Test what a login may do by the rules of an access file.", no_args_is_help=True)


@guarded
def passwd(
    file: Annotated[Path, typer.Argument(help="The password file.", metavar="FILE")],
    user: User,
    uin: Uin = 0,
    groups: Groups = None,
) -> None:
    """Set a user's password in a password file. It is asked for, or read from standard input where that is not a terminal."""
    from cluster.access.passwords import line_of, put_user

    if sys.stdin.isatty():
        password = typer.prompt("password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.buffer.readline().decode("utf-8-sig").rstrip("\r\n")
    known = put_user(file, user, line_of(user, password, uin, tuple(groups or ())))
    print_text(f"{user} {'changed' if known else 'added'} in {file}")


@guarded
def token(
    key: Annotated[Path, typer.Argument(help="The private key; created, with keys.json, if it does not exist.", metavar="KEY")],
    user: User,
    uin: Uin = 0,
    groups: Groups = None,
    lasts_s: Annotated[float, typer.Option("--for", help="Seconds for which the token is valid.", min=1)] = 3600.0,
    audience: Annotated[str, typer.Option(help="The audience, as in [jwt].")] = "pixiu",
    claims: Claims = None,
) -> None:
    """Make a token for a user and print it, where nobody else issues tokens."""
    said = _said(claims)
    if taken := next((name for name in said if name in RESERVED), ""):
        raise InvalidArgument(f"--claim {taken}: pixiu token sets this claim itself; look at its options")
    from cluster.access.minting import key_of
    from cluster.access.minting import token as make
    from cluster.trust.identity import MAX_SECRET_BYTES

    made = make(key_of(key), user, uin, tuple(groups or ()), lasts_s=lasts_s, audience=audience, more=said)
    if len(made) > MAX_SECRET_BYTES:
        raise InvalidArgument(
            f"the token would have {len(made)} bytes; at most {MAX_SECRET_BYTES} are accepted: give it fewer claims"
        )
    print(made)


def _said(claims: list[str] | None) -> dict[str, str]:
    """Claims of options NAME=VALUE. Raises `InvalidArgument`."""
    from cluster.trust.identity import MAX_CLAIM_BYTES

    found: dict[str, str] = {}
    for claim in claims or ():
        name, equals, value = claim.partition("=")
        if not equals or not name.isprintable() or not name:
            raise InvalidArgument("--claim: must be NAME=VALUE")
        if name in found:
            raise InvalidArgument(f"--claim {name}: is there twice")
        if len(value.encode()) > MAX_CLAIM_BYTES:
            raise InvalidArgument(f"--claim {name}: has more than {MAX_CLAIM_BYTES} bytes; rules would never match it")
        found[name] = value
    return found


@acl.command("test")
@guarded
def try_rules(
    user: User,
    action: Annotated[str, typer.Argument(help="publish, subscribe, signal, mail, inbox, presence, impersonate or revoke.")],
    target: Annotated[str, typer.Argument(help="room/NUMBER, user/UIN or a topic.", metavar="TARGET")],
    file: Annotated[Path, typer.Option("--file", help="The access file.", metavar="FILE")],
    uin: Uin = 0,
    groups: Groups = None,
    claims: Claims = None,
    client_id: Annotated[str, typer.Option(help="The client's ID.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show whether a login may do something, and which rule decides. Exit code 0: allowed, 1: denied."""
    from cluster.access.files import Files
    from cluster.access.rules import ACTIONS, IMPERSONATE, OF_TOPICS, REVOKE, RuleSet, of_topic_name
    from cluster.access.tenants.book import TenantBook
    from cluster.trust.identity import Identity

    if action not in ACTIONS:
        raise InvalidArgument(f"{action}: must be one of {', '.join(ACTIONS)}")
    said = _said(claims)
    files = Files(file)
    files.read_rules()
    book = TenantBook(lambda: 0.0)
    own = {tenant: RuleSet(rules) for tenant, rules in files.tenant_rules.items()}
    book.use(files.settings.all_tenants, files.settings.tenants, own)
    identity = Identity(user, uin, frozenset(groups or ()), said)
    if book:
        identity = book.place(identity)
    used = book.of(identity)
    rules = files.tenant_rules.get(identity.tenant, files.settings.rules)
    book.rules = RuleSet(files.settings.rules)
    permissions = book.permissions(identity, client_id, lambda *_: None)
    if used is not None:
        target = used.names.durable_outward(target) if action in OF_TOPICS else used.names.outward(target)
    what = "*" if action in (IMPERSONATE, REVOKE) else of_topic_name(target)
    allowed, rule = permissions.allows(action, what), permissions.rule_of(action, what)
    names = {0: "no rule matches: denied", len(rules) + 1: "the implicit last rule, for what is sent to oneself"}
    by, asked = names.get(rule, f"rule {rule}"), rules[rule - 1].ask if 0 < rule <= len(rules) else ""
    if as_json:
        print_json({"allowed": allowed, "rule": rule, "by": by, "asks": asked})
    else:
        outcome = f"the callback {asked} decides" if asked else "allowed" if allowed else "denied"
        print_text(f"{outcome}: {by}")
    if not allowed:
        raise typer.Exit(1)


@guarded
def kick(
    user: Annotated[str, typer.Argument(help="The user's name or UIN.", metavar="[USER]")] = "",
    target: Target = DEFAULT_TARGET,
    by: Annotated[str, typer.Option(help="Everybody who logged in by jwt, password, certificate or callback.", metavar="HOW")] = "",
    key: Annotated[
        str, typer.Option(help="With --by jwt: only logins with this key (kid); with --by certificate: with this serial number.")
    ] = "",
    everybody: Annotated[bool, typer.Option("--all", help="Everybody who has logged in.")] = False,
    client: Annotated[str, typer.Option(help="The clients with this ID, as `pixiu sessions` shows it.", metavar="ID")] = "",
    forget: Annotated[
        bool, typer.Option("--forget", help="With --client: remove its session and what waits for it, too, connected or not.")
    ] = False,
    tenant: Annotated[str, typer.Option(help="Everybody of this tenant.", metavar="NAME")] = "",
) -> None:
    """End sessions: of a user, of a client ID, of a tenant, of everybody who logged in by one authenticator or one key, or of
    everybody. They may log in again, unless a rule, the password file or the key set forbids it."""
    from cluster.access.kicks import Kick

    kick_ = Kick(user, by, key, everybody, client, forget, tenant)
    kick_.check()
    asyncio.run(post_kick(target, kick_.text()))
    if forget:  # of whoever was back before the session was removed: it must begin anew
        asyncio.run(post_kick(target, replace(kick_, forget=False).text()))
    signed = f" ({key})" if key else ""
    of_client = f"the client {client}{f' of {user}' if user else ''}"
    of_many = f"the tenant {tenant}" if tenant else f"all who came by {by}{signed}" if by else "everybody"
    who = of_client if client else user or of_many
    what = "remove" if forget else "end"
    look = f"; look at `pixiu sessions --client {client}{' --away' if forget else ''}`" if client else ""
    print_text(f"all gateways and proxies were notified to {what} the sessions of {who}{look}")


async def post_kick(target: str, request: str) -> None:
    """Post a kick for all gateways and proxies. Raises `RegistryUnavailable`."""
    async with registry_of(target) as (zookeeper, root), posted(zookeeper, f"{paths.kicks(root)}/r", request, sequence=True):
        await asyncio.sleep(KICK_S)
