"""Tokens that are taken, and every one that is not."""

from __future__ import annotations

import base64
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from cluster.access.tokens import TokenSettings, looks_like_token, read_keys, verify
from cluster.trust.identity import MAX_SECRET_BYTES
from pixiu.errors import ConfigurationError, NotAuthenticated

NOW = 1_800_000_000.0
SETTINGS = TokenSettings(algorithms=("EdDSA", "ES256", "RS256", "HS256"))
PRIVATE: dict[str, Any] = {
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "RS256": rsa.generate_private_key(65537, 2048),
    "HS256": b"shared-by-all" * 4,
}


def jwk(algorithm: str, kid: str) -> dict[str, Any]:
    """The public half, or the shared key, as a key set has it."""
    key, of = PRIVATE[algorithm], jwt.get_algorithm_by_name(algorithm)
    return {**of.to_jwk(key if isinstance(key, bytes) else key.public_key(), as_dict=True), "kid": kid}


KEYS = read_keys(json.dumps({"keys": [jwk(name, name) for name in PRIVATE]}).encode(), "keys.json")


def claims(**changed: Any) -> dict[str, Any]:
    found = {"sub": "alice", "uin": 7, "aud": "pixiu", "exp": NOW + 60, "groups": ["players"], "tenant": "acme", **changed}
    return {name: value for name, value in found.items() if value is not None}


def token(algorithm: str = "EdDSA", *, kid: str | None = None, header: dict[str, Any] | None = None, **changed: Any) -> str:
    head = {"kid": kid or algorithm, **(header or {})}
    return jwt.encode(claims(**changed), PRIVATE[algorithm], algorithm=algorithm, headers=head)


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize("algorithm", list(PRIVATE))
def test_a_token_says_who_somebody_is(algorithm: str) -> None:
    found = verify(token(algorithm), KEYS, SETTINGS, NOW)
    assert (found.user, found.uin, found.groups, found.by) == ("alice", 7, frozenset({"players"}), "jwt")
    assert found.claims["tenant"] == "acme"
    assert found.expires_at == NOW + 60 + SETTINGS.leeway_s


def test_a_token_without_a_uin_is_a_services() -> None:
    assert verify(token(uin=None), KEYS, SETTINGS, NOW).uin == 0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"exp": NOW - 6}, "has expired"),
        ({"exp": None}, "exp"),
        ({"exp": "soon"}, "not a time"),
        ({"exp": NOW + 100_000}, "too long"),
        ({"nbf": NOW + 60}, "not valid yet"),
        ({"iat": NOW + 60}, "not valid yet"),
        ({"aud": "others"}, "aud"),
        ({"aud": None}, "aud"),
        ({"aud": 5}, "aud"),
        ({"aud": True}, "aud"),
        ({"aud": {"pixiu": 1}}, "aud"),
        ({"sub": None}, "sub"),
        ({"sub": ""}, "sub"),
        ({"sub": True}, "user name"),
        ({"sub": "\ud800"}, "user name"),
        ({"sub": "x" * 257}, "user name"),
        ({"uin": -1}, "UIN"),
        ({"uin": 1 << 63}, "UIN"),
        ({"uin": 7.0}, "UIN"),
        ({"uin": "0x7"}, "UIN"),
        ({"groups": [1]}, "groups"),
        ({"groups": ["x"] * 100}, "groups"),
    ],
)
def test_what_a_token_must_not_say(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(NotAuthenticated, match=why) as caught:
        verify(token(**changed), KEYS, SETTINGS, NOW)
    assert "alice" not in str(caught.value)


def test_no_algorithm_and_an_algorithm_of_another_key_are_refused() -> None:
    unsigned = f"{part({'alg': 'none', 'typ': 'JWT'})}.{part(claims())}."
    assert looks_like_token(unsigned)
    with pytest.raises(NotAuthenticated, match="algorithm"):
        verify(unsigned, KEYS, SETTINGS, NOW)
    # The public key of another's signature as a shared secret: the classic confusion.
    public = PRIVATE["RS256"].public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    import hashlib
    import hmac

    head = f"{part({'alg': 'HS256', 'kid': 'RS256'})}.{part(claims())}"
    tag = base64.urlsafe_b64encode(hmac.new(pem, head.encode(), hashlib.sha256).digest()).rstrip(b"=").decode()
    with pytest.raises(NotAuthenticated, match="key is unknown"):
        verify(f"{head}.{tag}", KEYS, SETTINGS, NOW)


def test_a_token_of_an_algorithm_that_is_not_taken_is_refused_although_its_key_is_known() -> None:
    with pytest.raises(NotAuthenticated, match="algorithm"):
        verify(token("HS256"), KEYS, TokenSettings(), NOW)


def test_a_token_of_another_key_and_one_that_was_changed_are_refused() -> None:
    other = jwt.encode(claims(), ed25519.Ed25519PrivateKey.generate(), algorithm="EdDSA", headers={"kid": "EdDSA"})
    head, _, tag = token().split(".")
    for wrong in (other, f"{head}.{part(claims(uin=8))}.{tag}"):
        with pytest.raises(NotAuthenticated, match="signature"):
            verify(wrong, KEYS, SETTINGS, NOW)
    with pytest.raises(NotAuthenticated, match="key is unknown"):
        verify(token(kid="gone"), KEYS, SETTINGS, NOW)


@pytest.mark.parametrize(
    "header", [{"jku": "http://x"}, {"jwk": {}}, {"crit": ["exp"]}, {"cty": "JWT"}, {"x5u": "y"}, {"zip": "DEF"}]
)
def test_a_header_that_names_keys_or_nests_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(NotAuthenticated, match=r"header|nested"):
        verify(token(header=header), KEYS, SETTINGS, NOW)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "..",
        "eyJ.x.y",
        "a.b.c",
        "eyJhbGciOiJFZERTQSJ9",
        "\x00.\x00.\x00",
        "ü.ü.ü",
        part([]) + ".e30.",
        "ey" + "[" * 4000 + "..x",
    ],
)
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(NotAuthenticated):
        verify(text, KEYS, SETTINGS, NOW)


def test_a_huge_token_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(NotAuthenticated, match="at most"):
        verify(token(filler="x" * MAX_SECRET_BYTES), KEYS, SETTINGS, NOW)


def test_public_keys_as_pem_have_no_name_and_fit_any() -> None:
    kinds = ("EdDSA", "ES256", "RS256")
    where = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    pem = b"".join(PRIVATE[name].public_key().public_bytes(*where) for name in kinds)
    keys = read_keys(pem, "keys.pem")
    for name in kinds:
        assert verify(token(name, kid="any"), keys, SETTINGS, NOW).uin == 7


@pytest.mark.parametrize(
    "text", ["", "{}", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "c2hvcnQ"}]}', "-----BEGIN PUBLIC KEY-----\nx\n", "[]"]
)
def test_a_key_file_that_does_not_do_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^keys\.json: "):
        read_keys(text.encode(), "keys.json")


def test_a_short_rsa_key_is_refused() -> None:
    small = rsa.generate_private_key(65537, 1024).public_key()
    pem = small.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(ConfigurationError, match="2048"):
        read_keys(pem, "keys.pem")
