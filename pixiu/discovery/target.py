"""What a user may give to `connect`: addresses of proxies, or of ZooKeeper and a root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pixiu.errors import InvalidArgument

SCHEME: Final = "zk://"
MAX_ADDRESSES: Final = 64


@dataclass(frozen=True, slots=True)
class ProxyTarget:
    """Some proxies, `host:port` each; any of them tells the rest."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ZooKeeperTarget:
    """ZooKeeper servers (`host:port,host:port`) and the cluster's root path."""

    hosts: str
    root: str


def _addresses(text: str, target: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise InvalidArgument(
            f"the target {target!r} names no address; write 'host:port', 'host:port,host:port' or 'zk://host:port/root'"
        )
    if len(found) > MAX_ADDRESSES:
        raise InvalidArgument(f"the target names {len(found)} addresses; {MAX_ADDRESSES} are enough, the cluster tells the rest")
    for address in found:
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidArgument(f"{address!r} in the target {target!r} is not 'host:port' with a port from 1 to 65535")
        if "/" in host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
            raise InvalidArgument(
                f"{address!r} in the target {target!r} is not 'host:port'; an IPv6 address stands in brackets: '[::1]:7000'"
            )
    return found


def parse_target(target: str) -> ProxyTarget | ZooKeeperTarget:
    """Read a target: `"host:port,host:port"` (proxies) or `"zk://host:port,host:port/root"`.

    Raises `InvalidArgument` that says which part is wrong and what to write.
    Source: README.md.
    """
    if not target.startswith(SCHEME):
        if "://" in target:
            raise InvalidArgument(
                f"the target {target!r} has an unknown scheme; write 'host:port,host:port' or 'zk://host:port/root'"
            )
        return ProxyTarget(_addresses(target, target))
    # Imported here because kazoo takes a tenth of a second, which users of proxies need not wait for.
    from pixiu.discovery.zookeeper import parse_address

    registry = parse_address(target)
    return ZooKeeperTarget(registry.hosts, registry.root)
