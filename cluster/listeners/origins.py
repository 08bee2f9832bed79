"""Web pages that may use a listener, in an option such as `https://app.example.com, https://admin.example.com`. Pure.

Source: docs/operations.md, "MQTT over WebSocket"; RFC 6454.
"""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import urlsplit

ANY: Final = "*"
MAX_ORIGINS: Final = 100


class Origins:
    """A list of origins; `*` for all. Raises `ValueError` with a reason if the text is none.

    open_: an empty list allows all.
    """

    def __init__(self, text: str, *, open_: bool = False) -> None:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if len(words) > MAX_ORIGINS:
            raise ValueError(f"at most {MAX_ORIGINS} origins")
        for word in words:
            parts = urlsplit(word)
            if word != ANY and (parts.scheme not in ("http", "https") or word != f"{parts.scheme}://{parts.netloc}"):
                raise ValueError(f"{word[:80]!r} is no origin, such as https://app.example.com")
        self._all = ANY in words or (open_ and not words)
        self._allowed = frozenset(words)

    def allow(self, origin: str, host: str = "") -> bool:
        """True if a request with this `Origin` is allowed. Empty: no browser sends it for a page, so no page can misuse it.

        host: the request's. The same host by its address is allowed, as programs outside of browsers send it; by a name it is not:
        its owner may let it lead to any address.
        """
        return (
            not origin or self._all or origin in self._allowed or (bool(host) and _is_address(host) and origin == f"http://{host}")
        )


def _is_address(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True
