"""Texts with fields that follow from a message: `devices/{key}/events`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from pixiu.errors import InvalidArgument

MAX_TEMPLATE: Final = 1024
HEADER: Final = "header:"
LEVEL: Final = "level:"
_FIELD: Final = re.compile(r"\{([a-z]+|header:[^{}]{1,255}|level:[1-9][0-9]?)\}")


class FieldText:
    """A text with fields. Raises `InvalidArgument` for a field that is not allowed, and for an empty text.

    Args:
        text: of 1 to `MAX_TEMPLATE` characters.
        fields: allowed ones: names, and `header:` or `level:` for those that name a header or a level.
    """

    def __init__(self, text: str, fields: tuple[str, ...]) -> None:
        found = _FIELD.findall(text)
        rest = _FIELD.sub("", text)
        wrong = [each for each in found if each.partition(":")[0] + ":" * (":" in each) not in fields]
        if not text or len(text) > MAX_TEMPLATE or wrong or "{" in rest or "}" in rest:
            shown = ", ".join(f"{{{each}{'NAME' if each == HEADER else 'N' if each == LEVEL else ''}}}" for each in fields)
            raise InvalidArgument(f"{text[:80]!r} is no template: 1 to {MAX_TEMPLATE} characters, fields {shown}")
        self.text = text
        self.constant = not found
        """True if it has no fields."""

    def fill(self, value: Callable[[str], str]) -> str:
        """The text for a message; `value` gives that of a field."""
        return self.text if self.constant else _FIELD.sub(lambda match: value(match[1]), self.text)

    def example(self) -> str:
        """The text with "1" for each field: what is wrong with it is wrong with every message's."""
        return self.fill(lambda _name: "1")

    def pattern(self) -> str:
        """A filter of MQTT that matches every topic that the text can become: a field may hold several levels."""
        fixed = self.text.partition("{")[0]
        return self.text if self.constant else f"{fixed.rpartition('/')[0]}/#" if "/" in fixed else "#"
