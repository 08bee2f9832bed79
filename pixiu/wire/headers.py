"""Headers: a mapping of texts in a record's extension. Pure.

Format 1 of an extension is JSON in UTF-8; an object whose values are all texts holds headers. The application gets anything
else as bytes.

Source: docs/protocol.md, "Headers".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pixiu.errors import InvalidArgument

MAX_HEADERS: Final = 64
MAX_HEADER_NAME_BYTES: Final = 128
MAX_HEADERS_BYTES: Final = 65_535
"""Limit of the extension that headers make, bytes."""
NONE: Final[Mapping[str, str]] = MappingProxyType({})
_OBJECT: Final = b"{"


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Encode headers as an extension; empty for none. Raises `InvalidArgument`."""
    if not headers:
        return b""
    if len(headers) > MAX_HEADERS:
        raise InvalidArgument(f"a message has at most {MAX_HEADERS} headers, not {len(headers)}")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(f"headers map names to texts, not {name!r}: {value!r}")
        if not name or len(name.encode("utf-8", "replace")) > MAX_HEADER_NAME_BYTES:
            raise InvalidArgument(
                f"a header's name must have 1 to {MAX_HEADER_NAME_BYTES} bytes, not {name[:MAX_HEADER_NAME_BYTES]!r}"
            )
    try:
        made = json.dumps(dict(headers), ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise InvalidArgument("headers must be texts that UTF-8 can carry: one has a lone surrogate") from None
    if len(made) > MAX_HEADERS_BYTES:
        raise InvalidArgument(f"headers have at most {MAX_HEADERS_BYTES} bytes together, these {len(made)}")
    return made


def decode_headers(extension: bytes) -> Mapping[str, str]:
    """Decode the headers of an extension; none if it has another format. Never raises."""
    if not extension.startswith(_OBJECT):
        return NONE
    try:
        found = json.loads(extension)
    except (ValueError, RecursionError):
        return NONE
    if not isinstance(found, dict) or len(found) > MAX_HEADERS or not all(isinstance(value, str) for value in found.values()):
        return NONE
    return MappingProxyType(found)
