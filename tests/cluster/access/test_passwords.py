"""Hashes of a password file that were made elsewhere, with other costs."""

from __future__ import annotations

import base64
import hashlib

import pytest

from cluster.access.passwords import MAX_N, read_users


@pytest.mark.parametrize(("n", "r", "p"), [(2, 1, 1), (16, 8, 16), (MAX_N, 32, 16)])
def test_every_cost_that_a_file_may_name_can_be_computed(monkeypatch: pytest.MonkeyPatch, n: int, r: int, p: int) -> None:
    salt = b"0123456789abcdef"
    cheap = {"n": min(n, 16), "r": r, "p": p}
    digest = hashlib.scrypt(b"secret", salt=salt, **cheap, dklen=32, maxmem=1 << 30)
    asked: list[int] = []

    def scrypt(password: bytes, *, salt: bytes, n: int, r: int, p: int, dklen: int, maxmem: int) -> bytes:
        assert 128 * r * (n + p + 2) <= maxmem < 1 << 31, "OpenSSL refuses to compute it"
        asked.append(n)
        return original(password, salt=salt, n=cheap["n"], r=r, p=p, dklen=dklen, maxmem=maxmem)

    original = hashlib.scrypt
    monkeypatch.setattr(hashlib, "scrypt", scrypt)
    text = f"$scrypt${n}${r}${p}$".lstrip("$") + "$".join(base64.b64encode(part).decode() for part in (salt, digest))
    user = read_users(f"alice:7::{text}\n", "users")["alice"]
    assert user.fits("secret")
    assert not user.fits("another")
    assert asked == [n, n]
