"""Targets that a user may give to `connect`: addresses of proxies, or of ZooKeeper with a root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pixiu.discovery.paths import DEFAULT_ROOT, check_root
from pixiu.errors import InvalidArgument

SCHEME: Final = "zk://"
TLS_SCHEME: Final = "zks://"
"""Scheme of the registry by TLS."""
DEFAULT_PORT: Final = 2181
MAX_ADDRESSES: Final = 64
MAX_HOSTS: Final = 9
"""Limit of ZooKeeper servers in an address."""


@dataclass(frozen=True, slots=True)
class ProxyTarget:
    """Some proxies, `host:port` each; any of them knows the rest."""

    addresses: tuple[str, ...]


def _addresses(text: str, target: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise InvalidArgument(
            f"the target {target!r} names no address; write 'host:port', 'host:port,host:port' or 'zk://host:port/root'"
        )
    if len(found) > MAX_ADDRESSES:
        raise InvalidArgument(
            f"the target names {len(found)} addresses; {MAX_ADDRESSES} are enough, because the cluster reports the others"
        )
    for address in found:
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidArgument(f"{address!r} in the target {target!r} is not 'host:port' with a port from 1 to 65535")
        if "/" in host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
            raise InvalidArgument(
                f"{address!r} in the target {target!r} is not 'host:port'; an IPv6 address stands in brackets: '[::1]:7000'"
            )
    return found


def parse_target(target: str) -> ProxyTarget | RegistryAddress:
    """Read a target: `"host:port,host:port"` (proxies) or `"zk://host:port,host:port/root"`, by TLS `"zks://…"`.

    Raises `InvalidArgument` that names the wrong part and the correct form.
    Source: README.md.
    """
    if not names_registry(target):
        if "://" in target:
            raise InvalidArgument(
                f"the target {target!r} has an unknown scheme; write 'host:port,host:port' or 'zk://host:port/root'"
            )
        return ProxyTarget(_addresses(target, target))
    return parse_address(target)


def names_registry(target: str) -> bool:
    """True if a target is an address of ZooKeeper."""
    return target.startswith((SCHEME, TLS_SCHEME))


@dataclass(frozen=True, slots=True)
class RegistryAddress:
    """Address of the registry: ZooKeeper's servers as `host:port,host:port`, and the root above all nodes."""

    hosts: str
    root: str = DEFAULT_ROOT
    tls: bool = False
    """True if the connection to ZooKeeper uses TLS: `zks://`."""

    def __str__(self) -> str:
        return f"{TLS_SCHEME if self.tls else SCHEME}{self.hosts}{self.root}"


def parse_address(address: str) -> RegistryAddress:
    """Read `zk://host:port[,host:port]/root`, or `zks://…`; default port 2181, default root /pubsub.

    Raises `InvalidArgument` that describes the problem and shows an example.

    Source: docs/operations.md.
    """
    example = "an example: zk://10.0.0.1:2181,10.0.0.2:2181/pubsub"
    if not names_registry(address):
        raise InvalidArgument(f"the registry's address {address!r} must begin with {SCHEME} or {TLS_SCHEME}; {example}")
    servers, slash, rest = address[address.index("://") + 3 :].partition("/")
    root = check_root("/" + rest.rstrip("/")) if slash and rest.strip("/") else DEFAULT_ROOT
    found = servers.split(",")
    if len(found) > MAX_HOSTS:
        raise InvalidArgument(f"the registry's address {address!r} names {len(found)} servers; at most {MAX_HOSTS} are allowed")
    hosts = ",".join(_host_port(server, address, example) for server in found)
    return RegistryAddress(hosts, root, address.startswith(TLS_SCHEME))


def _host_port(server: str, address: str, example: str) -> str:
    host, colon, port = server.rpartition(":") if not server.endswith("]") else (server, "", "")
    if not colon:
        host, port = server, str(DEFAULT_PORT)
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or any(sign.isspace() or sign in "@/[]" for sign in bare) or (":" in bare and bare == host):
        raise InvalidArgument(f"the registry's address {address!r} has no host in {server!r}; {example}")
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= 65_535 and len(port) <= 5):
        raise InvalidArgument(f"the registry's address {address!r} has port {port!r}; a port is 1 to 65535; {example}")
    return f"{host}:{int(port)}"
