"""Streams between processes, by the names of their methods. Pure.

Callers that may open each: `cluster.listeners.call_guard.METHODS`.

Source: docs/links.md, "Framed streams".
"""

from __future__ import annotations

from typing import Final

LINK: Final = "/pixiu.v1.Link/Exchange"
TICKETS: Final = "/pixiu.v1.Tickets/Exchange"
STORE: Final = "/pixiu.v1.Xiu/Store"
EXCHANGE: Final = "/pixiu.v1.Pi/Exchange"
NOTIFY: Final = "/pixiu.v1.MailNotices/Notify"
DELIVER: Final = "/pixiu.v1.MailDelivery/Deliver"
REPLICATE: Final = "/pixiu.v1.Replication/Exchange"
