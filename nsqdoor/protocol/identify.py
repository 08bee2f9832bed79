"""IDENTIFY: what a client says of itself, and what both agree on. Pure.

Source: https://nsq.io/clients/tcp_protocol_spec.html, "IDENTIFY".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nsqdoor.protocol.commands import Refused
from nsqdoor.protocol.events import MIN_HEARTBEAT_MS, MIN_MSG_TIMEOUT_MS, Limits
from nsqdoor.protocol.extended import filter_of, is_tag

MAX_TEXT: Final = 128
"""Characters that are kept of a client's names."""
NO_HEARTBEATS: Final = -1
DEFLATE_LEVEL: Final = 6


@dataclass(frozen=True)
class Terms:
    """Terms of a connection."""

    heartbeat_ms: int
    """0: there are no heartbeats."""
    msg_timeout_ms: int
    tls: bool = False
    deflate: int = 0
    """Level; 0: no compression."""
    extended: bool = False
    tag: str = ""
    filter: list[dict[str, Any]] = field(default_factory=list)
    client: str = ""
    hostname: str = ""
    user_agent: str = ""
    answer: bytes = b""
    """JSON; empty: nothing was negotiated."""


def agreed(body: bytes, limits: Limits) -> Terms:
    """Agree on terms. Raises `Refused`."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise Refused("E_BAD_BODY", "IDENTIFY failed to decode JSON body")
    heartbeat = _number(said, "heartbeat_interval", limits.heartbeat_ms)
    if heartbeat != NO_HEARTBEATS and not MIN_HEARTBEAT_MS <= heartbeat <= limits.max_heartbeat_ms:
        raise Refused("E_BAD_BODY", f"IDENTIFY heartbeat interval ({heartbeat}) is invalid")
    timeout = _number(said, "msg_timeout", limits.msg_timeout_ms)
    if not MIN_MSG_TIMEOUT_MS <= timeout <= limits.max_msg_timeout_ms:
        raise Refused("E_BAD_BODY", f"IDENTIFY msg timeout ({timeout}) is invalid")
    tag = said.get("desired_tag") or ""
    if not is_tag(tag):
        raise Refused("E_BAD_TAG", "IDENTIFY desired_tag has at most 100 of A-Z a-z 0-9 _ -")
    wanted = said.get("ext_filter") or {}
    terms = Terms(
        heartbeat_ms=max(0, heartbeat),
        msg_timeout_ms=timeout,
        extended=said.get("extend_support") is True,
        tag=tag,
        filter=filter_of(wanted) if wanted and (not isinstance(wanted, dict) or wanted.get("type")) else [],
        client=_text(said, "client_id", "short_id"),
        hostname=_text(said, "hostname", "long_id"),
        user_agent=_text(said, "user_agent"),
    )
    if said.get("feature_negotiation") is not True:
        return terms
    tls = limits.tls and said.get("tls_v1") is True
    level = min(_number(said, "deflate_level", DEFLATE_LEVEL), limits.max_deflate_level)
    deflate = max(1, level) if limits.deflate and said.get("deflate") is True else 0
    answer = {
        "max_rdy_count": limits.max_rdy, "version": limits.version, "max_msg_timeout": limits.max_msg_timeout_ms,
        "msg_timeout": timeout, "tls_v1": tls, "deflate": bool(deflate), "deflate_level": deflate or DEFLATE_LEVEL,
        "max_deflate_level": limits.max_deflate_level, "snappy": False, "sample_rate": 0, "auth_required": limits.auth_required,
        "output_buffer_size": _number(said, "output_buffer_size", 16_384),
        "output_buffer_timeout": _number(said, "output_buffer_timeout", 250),
        "desired_tag": tag, "extend_support": terms.extended,
    }  # fmt: skip
    return Terms(**{**terms.__dict__, "tls": tls, "deflate": deflate, "answer": json.dumps(answer).encode()})


def _number(said: Mapping[str, Any], name: str, default: int) -> int:
    """A number of the client's; 0 and none: the default."""
    found = said.get(name) or default
    if not isinstance(found, int) or isinstance(found, bool) or abs(found) > 1 << 40:
        raise Refused("E_BAD_BODY", "IDENTIFY failed to decode JSON body")
    return found


def _text(said: Mapping[str, Any], *names: str) -> str:
    found = next((said[name] for name in names if said.get(name)), "")
    return found[:MAX_TEXT] if isinstance(found, str) else ""
