"""The tenants of a process: which one a login belongs to, its rules, and what each uses. Pure.

    token, answer of a callback ── claim ──┐
    password, certificate, callback ── user name TENANT/NAME ──┴─▶ identity: tenant, user TENANT/NAME, the cluster's UIN

Source: docs/tenants.md, "Who belongs to a tenant".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from cluster.access.rules import Decision, Permissions, RuleSet, Target
from cluster.access.tenants.names import TenantNames
from cluster.access.tenants.settings import MAX_LABELS, OTHERS, AllTenants, TenantSettings
from cluster.access.tenants.use import TenantUse
from cluster.trust.identity import Identity
from pixiu.errors import NotAuthenticated

BY_CLAIM_ALONE: Final = "jwt"
"""Authenticator whose user names say nothing about tenants: an issuer may let users choose them."""


class TenantPermissions(Permissions):
    """Permissions of a session of a tenant: rules see the tenant's own names, and nothing beyond the tenant is allowed."""

    __slots__ = ("_tenant",)

    def __init__(
        self, identity: Identity, names: TenantNames, rules: RuleSet, client_id: str,
        answers: Callable[[str, str, Target], bool | None],
    ) -> None:  # fmt: skip
        self._tenant = names
        inside = replace(identity, user=identity.name, uin=names.uin_inward(identity.uin))
        super().__init__(inside, rules, client_id, answers)

    def rule_of(self, action: str, target: Target) -> int:
        """See `Permissions.rule_of`."""
        inside = self._tenant.target_inward(action, target)
        return 0 if inside is None else super().rule_of(action, inside)

    def _first(self, action: str, target: Target) -> Decision:
        inside = self._tenant.target_inward(action, target)
        return False if inside is None else super()._first(action, inside)


class TenantBook:
    """The tenants that an access file has.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._all = AllTenants()
        self._used: dict[str, TenantUse] = {}
        self._rules: Mapping[str, RuleSet] = {}
        self.rules = RuleSet(())
        """Rules of the access file: for logins without a tenant, and tenants without rules of their own."""

    def __bool__(self) -> bool:
        """True if there are any."""
        return bool(self._used)

    def __iter__(self) -> Iterator[TenantUse]:
        return iter(self._used.values())

    def use(self, every: AllTenants, tenants: Mapping[str, TenantSettings], rules: Mapping[str, RuleSet]) -> bool:
        """Take over what a file has. `rules`: of tenants with a file of rules. Returns True if sessions must be decided anew."""
        before = {name: used.names for name, used in self._used.items()}
        changed = every != self._all
        self._all, self._rules = every, rules
        now = self._now()
        used: dict[str, TenantUse] = {}
        for number, (name, settings) in enumerate(tenants.items()):
            names, label = TenantNames(name, settings), name if number < MAX_LABELS else OTHERS
            found = self._used.get(name)
            if found is None or found.names != names:
                found = TenantUse(settings, names, label, now)
            elif (found.settings, found.label) != (settings, label):
                found.set(settings, label, now)
            used[name] = found
        self._used = used
        return changed or before != {name: each.names for name, each in used.items()}

    def of(self, identity: Identity) -> TenantUse | None:
        """The tenant of a login."""
        return self._used.get(identity.tenant) if identity.tenant else None

    def place(self, identity: Identity) -> Identity:
        """A login as the cluster sees it: with its tenant, the user TENANT/NAME and the cluster's UIN.

        Raises `NotAuthenticated` if it belongs to no tenant that there is, or its names are those of a tenant without being of it.
        """
        named, slash, rest = identity.user.partition("/")
        name = identity.claims.get(self._all.claim, "")
        user = identity.user
        if not name and slash and named in self._used:
            if identity.by == BY_CLAIM_ALONE or not rest:
                raise NotAuthenticated("the login's user name is that of a tenant, but the login does not name the tenant")
            name = named
        if name and slash and named == name and rest:
            user = rest
        if not name:
            if self._all.required:
                raise NotAuthenticated(f"the login belongs to no tenant: it needs the claim {self._all.claim}")
            if any(used.names.uin_inward(identity.uin) for used in self._used.values()):
                raise NotAuthenticated("the login's UIN is that of a tenant, but the login does not name the tenant")
            return identity
        used = self._used.get(name)
        if used is None:
            raise NotAuthenticated("the login belongs to a tenant that this cluster does not have")
        uin = used.names.uin_outward(identity.uin) if identity.uin else 0
        if identity.uin and not uin:
            low, high = used.names.uins
            raise NotAuthenticated(f"the login's UIN is beyond those of its tenant, 1 to {high - low + 1}")
        return replace(identity, user=f"{name}/{user}", uin=uin, tenant=name)

    def why_gone(self, identity: Identity) -> str:
        """Reason why a login that was placed is no longer valid; empty if it is."""
        if not identity.tenant:
            beyond = self._all.required or any(used.names.uin_inward(identity.uin) for used in self._used.values())
            return "the tenants have changed; log in again" if beyond else ""
        used = self._used.get(identity.tenant)
        fits = used is not None and (not identity.uin or used.names.uin_inward(identity.uin))
        return "" if fits else "the login's tenant has changed; log in again"

    def permissions(self, identity: Identity, client_id: str, answers: Callable[[str, str, Target], bool | None]) -> Permissions:
        """Permissions of a session. Raises `NotAllowed`."""
        used = self.of(identity)
        if used is None:
            return Permissions(identity, self.rules, client_id, answers)
        return TenantPermissions(identity, used.names, self._rules.get(identity.tenant, self.rules), client_id, answers)

    def spend(self, identity: Identity, messages: int, size: int) -> float:
        """Charge messages that a login publishes to its tenant. Returns the seconds for which its client must not be read from."""
        used = self.of(identity)
        return 0.0 if used is None else used.spend_in(messages, size, self._now())

    def samples(self) -> dict[str, object]:
        """Samples for metrics, by the tenants' labels."""
        found: dict[str, dict[str, float]] = {}
        for used in self._used.values():
            for name, value in (
                ("sessions", used.sessions), ("subscriptions", used.subscriptions), ("stage", int(used.stage)),
                ("kept_sessions", used.kept),
                *((f"{key}_total", getattr(used.counters, key)) for key in used.counters.__slots__),
            ):  # fmt: skip
                by_label = found.setdefault(f"tenant_{name}{{tenant}}", {})
                by_label[used.label] = by_label.get(used.label, 0) + value
        return dict(found)
