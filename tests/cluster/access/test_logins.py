"""Who calls: a client, by its login; nobody."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster.access.login_guard import LoginGuard
from cluster.access.logins import LOANS, address_of, credentials_of, enter
from cluster.core import log
from cluster.settings.options import ClusterOptions
from cluster.trust.audit import Audit
from cluster.trust.followed_keys import KEYS_S, ProofKeys
from cluster.trust.key_ring import KeyRing
from pixiu.errors import NotAuthenticated
from tests.support.logins import Logins


def test_what_strangers_show_does_not_make_keys_be_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, read, now = tmp_path / "1.key", [0], [100.0]
    key.write_bytes(b"of-the-cluster-1")
    cluster = ClusterOptions(key_dir=str(tmp_path))
    ring_of = ClusterOptions.key_ring

    def counted(options: ClusterOptions) -> KeyRing | None:
        read[0] += 1
        return ring_of(options)

    monkeypatch.setattr(ClusterOptions, "key_ring", counted)
    keys = ProofKeys(cluster.key_ring, LOANS, lambda: now[0])
    found = [keys.newest() for _ in range(100)]
    assert (read, len(found[0])) == ([1], 1)
    key.write_bytes(b"short")
    now[0] += KEYS_S
    assert keys.newest() == ()  # and no error with a path in it
    key.write_bytes(b"of-the-cluster-1")
    now[0] += KEYS_S
    assert keys.newest() == found[0]
    assert read == [3]


class Caller:
    """A gRPC call, as far as listeners look at it."""

    def __init__(self, *headers: str, peer: str = "ipv4:10.0.0.9:41000") -> None:
        self._headers, self._peer = headers, peer

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(("authorization", header) for header in self._headers)


@pytest.mark.parametrize(
    "headers",
    [
        (), ("",), ("Bearer",), ("Bearer ",), ("Basic !",), ("Basic 4pyT",), ("Basic /w==",), ("Digest x",), ("nonsense",),
        ("Bearer a", "Bearer b"),
    ],
)  # fmt: skip
async def test_a_call_with_no_login_or_half_a_one_is_refused_counted_and_audited(tmp_path: Path, headers: tuple[str, ...]) -> None:
    lines: list[Mapping[str, object]] = []
    guard = LoginGuard(str(Logins(tmp_path).file), log.get_logger(), Audit(None, tell=lambda _, fields: lines.append(fields)))
    with pytest.raises(NotAuthenticated):
        await enter(guard, Caller(*headers), "", lambda _: None)
    assert guard.counts["refused"] == 1
    assert [(line["address"], bool(line["why"])) for line in lines] == [("10.0.0.9", True)]
    await guard.close()


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.9:41000", "10.0.0.9"), ("ipv6:%5B2001:db8::1%5D:41000", "2001:db8::1"), ("ipv6:[::1]:7", "::1"),
        ("unix:", "unix:"),
    ],
)  # fmt: skip
def test_an_address_is_as_other_listeners_name_it(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_an_authorization_that_is_none_is_told_what_to_send() -> None:
    with pytest.raises(NotAuthenticated, match=r"PIXIU_TOKEN.*Bearer TOKEN"):
        credentials_of("Digest x", "phone", "10.0.0.1")
