"""Names at a target that follow from the message: `devices/{key}/events`. Pure."""

from __future__ import annotations

import re
from typing import Final

from bridge.connector import Item
from pixiu.errors import InvalidArgument

_FIELD: Final = re.compile(r"\{(topic|key|header:[^{}]{1,255})\}")
MAX_TEMPLATE: Final = 1024


class Template:
    """A text with fields {topic}, {key} and {header:NAME}. Raises `InvalidArgument` for another field, and for an empty text."""

    def __init__(self, text: str) -> None:
        rest = _FIELD.sub("", text)
        if not text or len(text) > MAX_TEMPLATE or "{" in rest or "}" in rest:
            raise InvalidArgument(
                f"{text[:80]!r} is no template: 1 to {MAX_TEMPLATE} characters, fields {{topic}}, {{key}}, {{header:NAME}}"
            )
        self._text = text

    def fill(self, item: Item) -> str:
        """The text for a message; a field that it does not have is empty, and what is no UTF-8 is replaced."""

        def value(match: re.Match[str]) -> str:
            name = match[1]
            if name == "topic":
                return item.topic
            data = item.key if name == "key" else item.headers.get(name.partition(":")[2])
            return (data or b"").decode(errors="replace")

        return _FIELD.sub(value, self._text)
