"""Names at a target that follow from the message: `devices/{key}/events`. Pure."""

from __future__ import annotations

from bridge.connector import Item
from cluster.routes.templates import HEADER, FieldText


class Template:
    """A text with fields {topic}, {key} and {header:NAME}. Raises `InvalidArgument` for another field, and for an empty text."""

    def __init__(self, text: str) -> None:
        self.text = FieldText(text, ("topic", "key", HEADER))

    def fill(self, item: Item) -> str:
        """The text for a message; a field that it does not have is empty, and what is no UTF-8 is replaced."""

        def value(name: str) -> str:
            if name == "topic":
                return item.topic
            data = item.key if name == "key" else item.headers.get(name.removeprefix(HEADER))
            return (data or b"").decode(errors="replace")

        return self.text.fill(value)
