"""JSON Web Tokens: keys, and identities in tokens. Pure: the clock and the keys' text are given.

A key's type determines the algorithms that it may be used with, and the settings determine which of these are accepted at all: a
token only selects among them. A token is refused for its size before it is parsed.

Source: docs/security.md, "Tokens"; RFC 7519, RFC 7515, RFC 7517, RFC 8725 (best practices).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from cluster.trust.identity import MAX_SECRET_BYTES, Identity, claims_of, groups_of, uin_of, user_of
from pixiu.errors import ConfigurationError, NotAuthenticated

ALGORITHMS: Final = (
    "EdDSA", "ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "HS256", "HS384", "HS512",
)  # fmt: skip
"""All algorithms that settings may name. There is no `none`."""
MAX_KEYS: Final = 64
MIN_RSA_BITS: Final = 2048
MIN_SHARED_BYTES: Final = 32
_CURVES: Final = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """Requirements for tokens. Empty `audience` or `issuer`: it is not checked."""

    algorithms: tuple[str, ...] = ("EdDSA", "ES256", "RS256")
    audience: str = "pixiu"
    issuer: str = ""
    leeway_s: float = 5.0
    """Seconds by which clocks may differ."""
    max_age_s: float = 86_400.0
    """Longest remaining validity of an accepted token, seconds: a lost token must not be usable for ever."""
    uin_claim: str = "uin"
    user_claim: str = "sub"
    groups_claim: str = "groups"


@dataclass(frozen=True, slots=True)
class Key:
    """One key, with the algorithms that its type allows."""

    kid: str
    key: Any
    algorithms: frozenset[str]
    fingerprint: str = ""
    """Fingerprint of the key itself: it does not depend on the key's name."""

    @property
    def name(self) -> str:
        """Its `kid`, or the beginning of its fingerprint; for people."""
        return self.kid or self.fingerprint[:16]


def looks_like_token(secret: str) -> bool:
    """True if a secret has the three parts of a signed token."""
    return secret.count(".") == 2 and secret.startswith("ey")


def read_keys(text: bytes, name: str) -> tuple[Key, ...]:
    """Keys of a file: a JWKS, or public keys as PEM, one after another. Raises `ConfigurationError` that names the file."""
    try:
        found = _of_pem(text) if b"-----BEGIN" in text else _of_jwks(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UnsupportedAlgorithm, jwt.PyJWTError) as error:
        raise ConfigurationError(f"{name}: not a key set (a JWKS, or public keys as PEM): {type(error).__name__}") from None
    if not 0 < len(found) <= MAX_KEYS:
        raise ConfigurationError(f"{name}: {len(found)} keys; must be 1 to {MAX_KEYS}")
    return tuple(_checked(kid, key, name) for kid, key in found)


def verify(token: str, keys: Sequence[Key], settings: TokenSettings, now: float) -> Identity:
    """Verify a token and return its identity. `now`: Unix seconds.

    Raises `NotAuthenticated`, which gives the reason, but none of the token's content.
    """
    if len(token) > MAX_SECRET_BYTES:
        raise NotAuthenticated(f"a token has at most {MAX_SECRET_BYTES} bytes")
    algorithm, kid = _header(token)
    if algorithm not in settings.algorithms:
        raise NotAuthenticated("the token's algorithm is not among those that this cluster accepts")
    fitting = [key for key in keys if algorithm in key.algorithms and (not kid or not key.kid or kid == key.kid)]
    for key in fitting:
        try:
            payload = jwt.api_jws.decode(token, key.key, algorithms=[algorithm])
        except (jwt.PyJWTError, ValueError, TypeError):
            continue
        return replace(_identity(_claims(payload), settings, now), proof=key.fingerprint, signed_by=key.name)
    raise NotAuthenticated("the token's signature fits no key of this cluster" if fitting else "the token's key is unknown")


def _header(token: str) -> tuple[str, str]:
    """Algorithm and name of the key. Headers that would make a verifier fetch or trust a key of the token's own are refused."""
    try:
        head = token.split(".", 1)[0]
        header = json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        raise NotAuthenticated("the token is malformed") from None
    if not isinstance(header, dict) or {"crit", "jku", "jwk", "x5u", "x5c", "b64", "enc", "zip"} & header.keys():
        raise NotAuthenticated("the token's header has a field that this cluster does not accept")
    if str(header.get("cty", "")).upper() == "JWT":
        raise NotAuthenticated("the token is nested in another one")
    algorithm, kid = header.get("alg"), header.get("kid", "")
    if not isinstance(algorithm, str) or not isinstance(kid, str):
        raise NotAuthenticated("the token is malformed")
    return algorithm, kid


def _claims(payload: bytes) -> dict[str, Any]:
    try:
        claims = json.loads(payload)
    except (ValueError, RecursionError):
        raise NotAuthenticated("the token is malformed") from None
    if not isinstance(claims, dict):
        raise NotAuthenticated("the token is malformed")
    return claims


def _identity(claims: Mapping[str, Any], settings: TokenSettings, now: float) -> Identity:
    expires, leeway = _time(claims, "exp"), settings.leeway_s
    if expires is None:
        raise NotAuthenticated("the token has no time at which it expires (exp)")
    if now >= expires + leeway:
        raise NotAuthenticated("the token has expired")
    if expires > now + settings.max_age_s + leeway:
        raise NotAuthenticated("the token is valid for too long (jwt.max_age_s)")
    for claim in ("nbf", "iat"):
        begins = _time(claims, claim)
        if begins is not None and now < begins - leeway:
            raise NotAuthenticated("the token is not valid yet")
    audience = claims.get("aud")
    if settings.audience and settings.audience not in (audience if isinstance(audience, list) else (audience,)):
        raise NotAuthenticated("the token is for another audience (aud)")
    if settings.issuer and claims.get("iss") != settings.issuer:
        raise NotAuthenticated("the token is from another issuer (iss)")
    user = claims.get(settings.user_claim)
    if user in (None, ""):
        raise NotAuthenticated(f"the token does not say who it is for ({settings.user_claim})")
    uin = uin_of(claims.get(settings.uin_claim))
    return Identity(user_of(user), uin, groups_of(claims.get(settings.groups_claim)), claims_of(claims), expires + leeway, "jwt")


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 53:
        raise NotAuthenticated(f"the token's {name} is not a time")
    return float(value)


def _of_pem(text: bytes) -> list[tuple[str, Any]]:
    parts = text.split(b"-----BEGIN ")[1:]
    return [("", serialization.load_pem_public_key(b"-----BEGIN " + part)) for part in parts]


def _of_jwks(text: bytes) -> list[tuple[str, Any]]:
    keys = json.loads(text)["keys"]
    return [(str(item.get("kid", "")), jwt.PyJWK(item).key) for item in keys if item.get("use", "sig") == "sig"]


def _checked(kid: str, key: Any, name: str) -> Key:
    """A key with its algorithms. A private key is reduced to its public half."""
    if isinstance(key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey):
        key = key.public_key()
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= MIN_RSA_BITS:
        return Key(kid, key, frozenset(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")), _fingerprint(key))
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return Key(kid, key, frozenset((_CURVES[key.curve.name],)), _fingerprint(key))
    if isinstance(key, ed25519.Ed25519PublicKey):
        return Key(kid, key, frozenset(("EdDSA",)), _fingerprint(key))
    if isinstance(key, bytes) and len(key) >= MIN_SHARED_BYTES:
        return Key(kid, key, frozenset(("HS256", "HS384", "HS512")), _fingerprint(key))
    raise ConfigurationError(
        f"{name}: key {kid or 'without a kid'}: must be Ed25519, P-256, P-384, P-521, RSA of at least {MIN_RSA_BITS} bits, or a "
        f"shared key of at least {MIN_SHARED_BYTES} bytes"
    )


def _fingerprint(key: Any) -> str:
    where = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    data = key if isinstance(key, bytes) else key.public_bytes(*where)
    return hashlib.sha256(b"pixiu-jwt-key" + data).hexdigest()
