"""Headers of Youzan's extended messages, as a topic's headers, tag and mark of a load test. Pure.

    PUB_EXT body   [length: u16][JSON object][message]

| JSON | a topic's message |
|---|---|
| `##client_dispatch_tag` | tag |
| `zan_test` true | mark of a load test |
| a text | header with this value |
| another value | header with its JSON |

Source: How we redesigned the NSQ (docs/sources.md); docs/nsq.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nsqdoor.protocol.commands import Refused

TAG_KEY: Final = "##client_dispatch_tag"
LOAD_TEST_KEY: Final = "zan_test"
LENGTH_BYTES: Final = 2
MAX_HEADERS: Final = 64
MAX_TAG: Final = 100
MAX_NAME_BYTES: Final = 255
MAX_EXTENSION: Final = 0xFFFF
TAG_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
FILTER_KINDS: Final = {1: "equal", 2: "regex", 3: "glob"}
SEVERAL: Final = 4
"""Kind of a filter of several headers."""


class Headers(NamedTuple):
    """Fields that stand beside a message's body."""

    values: Mapping[str, bytes]
    tag: str = ""
    load_test: bool = False


NO_HEADERS: Final = Headers({})


def split(body: bytes) -> tuple[Headers, bytes]:
    """Headers and message of an extended body. Raises `Refused`."""
    size = int.from_bytes(body[:LENGTH_BYTES], "big")
    if len(body) <= LENGTH_BYTES + size:
        raise Refused("E_BAD_BODY", f"invalid body size {len(body)} in ext json header content length")
    found = body[LENGTH_BYTES : LENGTH_BYTES + size]
    return (headers_of(found) if found else NO_HEADERS), body[LENGTH_BYTES + size :]


def headers_of(found: bytes) -> Headers:
    """Headers of a JSON object. Raises `Refused`."""
    try:
        values = json.loads(found)
    except (ValueError, RecursionError):
        raise _bad("it is no JSON") from None
    if not isinstance(values, dict):
        raise _bad("it is no JSON object")
    tag = values.pop(TAG_KEY, "")
    if not is_tag(tag):
        raise Refused("E_BAD_TAG", f"a tag has at most {MAX_TAG} of A-Z a-z 0-9 _ -", fatal=False)
    load_test = values.pop(LOAD_TEST_KEY, False) in (True, "true")
    if len(values) > MAX_HEADERS or any(not 0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES for name in values):
        raise _bad(f"at most {MAX_HEADERS} headers with names of 1 to {MAX_NAME_BYTES} bytes")
    try:
        encoded = {name: (value if isinstance(value, str) else _json(value)).encode() for name, value in values.items()}
        "".join(values).encode()
    except UnicodeEncodeError:
        raise _bad("it has half a character") from None
    return Headers(encoded, tag, load_test)


def is_tag(tag: object) -> bool:
    """True for a tag, and for an empty text."""
    return isinstance(tag, str) and len(tag) <= MAX_TAG and TAG_CHARACTERS.issuperset(tag)


def _bad(why: str) -> Refused:
    return Refused("E_INVALID_JSON_HEADER", f"fail to parse json header: {why}", fatal=False)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def extension_of(headers: Headers) -> bytes:
    """The JSON of headers; empty: there are none. Headers that do not fit 64 KiB are left out, the largest first."""
    values: dict[str, Any] = {name: value.decode(errors="replace") for name, value in headers.values.items()}
    if headers.tag:
        values[TAG_KEY] = headers.tag
    if headers.load_test:
        values[LOAD_TEST_KEY] = True
    while values:
        found = _json(values).encode()
        if len(found) <= MAX_EXTENSION:
            return found
        values.pop(max(values, key=lambda name: len(str(values[name]))))
    return b""


def filter_of(found: object) -> list[dict[str, Any]]:
    """A channel's filter, of the field `ext_filter` of IDENTIFY. Raises `Refused`."""
    if not isinstance(found, dict):
        raise _bad_filter()
    kind, key, data = found.get("type", 0), found.get("filter_ext_key", ""), found.get("filter_data", "")
    if kind == SEVERAL and key == "all" and isinstance(found.get("filter_data_list"), list):
        several = [each if isinstance(each, dict) else {} for each in found["filter_data_list"]]
        pairs = [(each.get("filter_ext_key"), each.get("filter_data")) for each in several]
        condition = "equal"
    else:
        pairs, condition = [(key, data)], FILTER_KINDS.get(kind, "") if isinstance(kind, int) else ""
    if (
        not condition
        or not 0 < len(pairs) <= MAX_HEADERS
        or not all(isinstance(each, str) and each for pair in pairs for each in pair)
    ):
        raise _bad_filter()
    if not found.get("inverse"):
        return [{"header": name, condition: value} for name, value in pairs]
    if len(pairs) > 1:
        raise _bad_filter()
    return [{"header": name, "not": {condition: value}} for name, value in pairs]


def _bad_filter() -> Refused:
    return Refused("E_BAD_BODY", "IDENTIFY ext_filter is not usable: type 1 (equal), 2 (regex), 3 (glob), or 4 of all, not inverse")
