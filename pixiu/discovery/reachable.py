"""Check that anybody listens at a target, so that a command reports «no cluster» at once and not after a time-out."""

from __future__ import annotations

import socket
from typing import Final

from pixiu.discovery.target import RegistryAddress, names_registry, parse_target
from pixiu.errors import RegistryUnavailable, Unreachable

TRY_S: Final = 0.5
"""Time limit for one address, seconds; the command's own connect, which follows, has its usual time."""
UNKNOWN_NAME: Final = (socket.EAI_NONAME, socket.EAI_NODATA) if hasattr(socket, "EAI_NODATA") else (socket.EAI_NONAME,)
"""Errors of a resolver that has answered."""
START_ONE: Final = "start a cluster with `pixiu up`, or name another one with --target or PIXIU_TARGET"


def check_reachable(target: str) -> None:
    """Return when one address of the target accepts a TCP connection, or may only be slow.

    Raises RegistryUnavailable or Unreachable when all refuse it or their names are not known; InvalidArgument for a target that
    cannot be read.
    """
    found, unknown = parse_target(target), list[str]()
    addresses = found.hosts.split(",") if isinstance(found, RegistryAddress) else found.addresses
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), TRY_S):
                return
        except ConnectionRefusedError:
            continue
        except socket.gaierror as error:
            if error.errno not in UNKNOWN_NAME:
                return  # the resolver does not answer now: the command itself reports it
            unknown.append(host)
        except OSError:
            return  # slow: the command itself reports it
    where = ", ".join(addresses) + (f" (no host is named {', '.join(unknown)})" if unknown else "")
    if names_registry(target):
        raise RegistryUnavailable(f"no cluster: no ZooKeeper listens at {where}; {START_ONE}")
    raise Unreachable(f"no cluster: no proxy listens at {where}; {START_ONE}")
