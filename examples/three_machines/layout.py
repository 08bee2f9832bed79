"""Writes the layout of the three machines into ZooKeeper, once, before the first process starts.

    python examples/three_machines/layout.py zk://127.0.0.1:2181/three

Run again it changes nothing; with other numbers of partitions than the cluster has it is refused.
"""

from __future__ import annotations

import asyncio
import sys

from pixiu.discovery.target import parse_address
from pixiu.discovery.view import RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from registry.layout import ensure_layout

LAYOUT = {role: RoleLayout(n=1, next=1, replicas=3) for role in ("router", "broker", "relay", "xiu", "pi", "proxy", "gateway")}
"""One partition of each role, with a replica on each machine."""


async def main(target: str) -> None:
    """Write it, and say what is there then."""
    address = parse_address(target)
    zookeeper = ZooKeeper(address.hosts)
    await zookeeper.connect()
    try:
        layout = await ensure_layout(zookeeper, address.root, LAYOUT)
    finally:
        await zookeeper.close()
    print(f"layout {layout.version} at {target}: " + ", ".join(f"{role} {said.n}" for role, said in sorted(layout.roles.items())))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
