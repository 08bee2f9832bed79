"""Permissions for messages on links: one table, kind × role of the sender × role of the receiver. Pure.

Source: docs/security.md, "Links".
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from cluster.wire.v1 import control_pb2

RECORDS: Final = "records"
_MEMBERS: Final[dict[str, tuple[str, ...]]] = {
    "router": ("gateway", "router"),
    "relay": ("gateway", "relay"),
    "broker": ("router",),
}
_ASKED: Final[dict[str, tuple[str, ...]]] = {"router": ("broker", "router"), "relay": ("relay",), "gateway": ("relay", "router")}
_TO_GATEWAYS: Final[dict[str, tuple[str, ...]]] = {"gateway": ("relay", "router")}
_NOTICE: Final = ("broker", "relay", "router")
MAY_SAY: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    RECORDS: {
        "broker": ("broker", "proxy"),
        "gateway": ("broker", "relay"),
        "proxy": ("gateway",),
        "relay": ("broker", "proxy", "relay"),
    },
    "gateway_messages": _MEMBERS,
    "gateway_confirm": _TO_GATEWAYS,
    "layout_notice": dict.fromkeys(("broker", "gateway", "proxy", "relay", "router"), _NOTICE),
    "publish_batch": {"proxy": ("gateway",)},
    "publish_outcome": {"gateway": ("proxy",)},
    "chat_offline": {"proxy": ("relay",)},
    "device_replaced": {"gateway": ("relay",)},
    "signals_delivered": {"proxy": ("gateway",)},
    "will_states": {"relay": ("gateway", "relay")},
    "publish_will": {"gateway": ("relay",)},
    "will_published": {"relay": ("gateway",), "gateway": ("relay",)},
    "digest_request": _ASKED,
    "listing_request": _ASKED,
    "instance_roots": _MEMBERS,
    "bucket_digests": _MEMBERS,
    "listing_page": _MEMBERS,
    "absence": _MEMBERS,
    "fenced": _TO_GATEWAYS,
    "shared_outcome": {"broker": ("gateway",)},
}
"""Kind of control message, or `records` → receiver → senders."""
_BY_TAG: Final[dict[int, str]] = {
    field.number << 3 | 2: field.name for field in control_pb2.Control.DESCRIPTOR.oneofs_by_name["body"].fields if field.number < 16
}
"""Kinds whose tag is one byte."""


def may_say(kind: str, sender: str, receiver: str) -> bool:
    """Return True if a process of the role `sender` may send this kind to one of the role `receiver`."""
    return sender in MAY_SAY.get(kind, {}).get(receiver, ())


def kind_of(message: bytes) -> str | None:
    """Return the kind of a serialized control message; empty if this version does not know it, None if it is malformed.

    A message of one field, with at most 16 KiB, is recognized by its tag and length; all others are parsed.
    """
    size = len(message) - 2
    if size >= 0 and message[0] in _BY_TAG:
        # It is one field if its length, a varint of one or two bytes after the tag, is that of the rest.
        length = message[1]
        if length == size if size < 128 else length >= 128 > message[2] and length - 128 + 128 * message[2] == size - 1:
            return _BY_TAG[message[0]]
    try:
        control = control_pb2.Control.FromString(message)
    except DecodeError:
        return None
    kind: str | None = control.WhichOneof("body")
    return kind or ""
