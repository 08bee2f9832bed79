"""Networks in an option, such as `10.0.0.0/8, fd00::/8`. Pure."""

from __future__ import annotations

import ipaddress
from typing import Final

MAX_NETWORKS: Final = 256


class Networks:
    """A list of IP networks. Raises `ValueError` with a reason if the text is none."""

    def __init__(self, text: str) -> None:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if len(words) > MAX_NETWORKS:
            raise ValueError(f"at most {MAX_NETWORKS} networks")
        self._networks = [ipaddress.ip_network(word) for word in words]

    def __bool__(self) -> bool:
        return bool(self._networks)

    def have(self, address: str) -> bool:
        """True if an address is in one of them."""
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return any((mapped or found) in network for network in self._networks)
