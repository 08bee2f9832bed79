"""Inputs of the console's requests: each has a limit that is checked before it is parsed. Pure.

Source: docs/console.md, "Requests".
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID

MAX_TEXT: Final = 256
MAX_FILTER: Final = 4096
MAX_DIGITS: Final = 19
MAX_BODY_BYTES: Final = 16_384
"""Bytes of a request's body."""
MAX_FIELDS: Final = 16
MAX_NAME: Final = 32
"""Characters of an unknown field's name that an error repeats."""
MAX_LIST: Final = 256
MAX_DEPTH: Final = 4
"""Brackets in one another of a body: an object with lists."""


class Inputs:
    """The fields of a request by name: of its query, or of a body in JSON."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        if len(fields) > MAX_FIELDS:
            raise InvalidArgument(f"a request has at most {MAX_FIELDS} fields")
        self._fields = fields

    def only(self, names: Collection[str]) -> None:
        """Refuse other fields: what somebody misspelt would count as not there. Raises `InvalidArgument`."""
        for name in self._fields:
            if name not in names:
                raise InvalidArgument(f"{name[:MAX_NAME]!r} is no field of this request, which has {', '.join(names)}")

    def text(self, name: str, default: str | None = None, most: int = MAX_TEXT) -> str:
        """A text without control characters. default: for a field that is not there; None: it must be there and not be empty."""
        found = self._fields.get(name, "" if default is None else default)
        if not isinstance(found, str):
            raise InvalidArgument(f"{name}: must be a text")
        if len(found) > most:
            raise InvalidArgument(f"{name}: must have at most {most} characters")
        if not found.isprintable() or not _is_unicode(found):
            raise InvalidArgument(f"{name}: has characters that cannot be shown")
        if default is None and not found:
            raise InvalidArgument(f"{name}: is missing")
        return found

    def number(self, name: str, default: int | None = None, least: int = 0, most: int = MAX_ID) -> int:
        """A whole number. Raises `InvalidArgument` if it is not in the range, or missing without a default."""
        found = self._fields.get(name, default)
        if found is None or found == "":
            if default is None:
                raise InvalidArgument(f"{name}: is missing")
            return default
        if isinstance(found, str) and found.isascii() and found.isdecimal() and len(found) <= MAX_DIGITS:
            found = int(found)
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            raise InvalidArgument(f"{name}: must be a number from {least} to {most}")
        return found

    def flag(self, name: str) -> bool:
        """True, or false for a field that is not there."""
        found = self._fields.get(name, False)
        if found in ("", "0", "false", False):
            return False
        if found in ("1", "true", True):
            return True
        raise InvalidArgument(f"{name}: must be true or false")

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        """One of these texts; the first one for a field that is not there."""
        found = self.text(name, allowed[0])
        if found not in allowed:
            raise InvalidArgument(f"{name}: must be one of {', '.join(allowed)}")
        return found

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers; empty for a field that is not there."""
        found = self._fields.get(name, [])
        if not isinstance(found, list) or len(found) > MAX_LIST:
            raise InvalidArgument(f"{name}: must be a list of at most {MAX_LIST} numbers")
        return [Inputs({name: each}).number(name) for each in found]


def body_of(data: bytes) -> Inputs:
    """Inputs in a body. Raises `InvalidArgument` if it is too large or no JSON object."""
    if len(data) > MAX_BODY_BYTES:
        raise InvalidArgument(f"a body has at most {MAX_BODY_BYTES} bytes")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        raise InvalidArgument("a body is one JSON object of texts, numbers and lists of numbers")
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        raise InvalidArgument("the body is not JSON") from None
    if not isinstance(found, dict):
        raise InvalidArgument("the body must be a JSON object")
    return Inputs(found)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
