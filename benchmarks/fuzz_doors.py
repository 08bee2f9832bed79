"""Every door of a cluster that is guarded (`pixiu up --secure`), with peers that have no login, for minutes each: does anything
crash, does memory grow, is a traceback in a log, is an honest client served still? One door after the other, or all at once
(`--together`: then the gateway's memory is that of three doors, the broker's of two).

Estimate: hundreds of connections a second at each door; memory grows by what is held for connections that have not said who they
are, some MiB, and stays there.

    python -m benchmarks.fuzz_doors [--minutes 2] [--seed 1] [--together] [--doors mqtt,gateway,proxy,cluster,links,http]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import pixiu
from cluster.access.minting import make_demo
from pixiu.rpc import tls
from registry.pki import issue, make_authority
from registry.up import LocalCluster, UpOptions
from tests.support.door_fuzz import Attack, Door

NAMES = ("mqtt", "gateway", "proxy", "cluster", "links", "http")


def doors(cluster: LocalCluster) -> list[Door]:
    """All of them."""
    nodes = {child.node.role: child.node for child in cluster.children.values() if child.node is not None}
    gateway, proxy, broker = nodes["gateway"], nodes["proxy"], nodes["broker"]
    return [
        Door("mqtt", gateway.mqtt_host, gateway.mqtt_port, gateway.pid, "tls"),
        Door("gateway", gateway.client_host, gateway.client_port, gateway.pid, "tls"),
        Door("proxy", proxy.client_host, proxy.client_port, proxy.pid, "tls"),
        Door("cluster", broker.host, broker.port, broker.pid, "tls"),
        Door("links", broker.host, broker.port, broker.pid, "udp"),
        Door("http", gateway.host, gateway.http_port, gateway.pid, "plain"),
    ]


async def served(cluster: LocalCluster, folder: Path) -> float:
    """Seconds until a message of an honest client has arrived."""
    begin, token = time.monotonic(), (folder / "secure/token").read_text()
    async with (
        asyncio.timeout(30),
        pixiu.connect(cluster.target, token=token, ca=str(folder / "doors/ca.pem")) as px,
        px.subscribe(room=42) as messages,
    ):
        await px.room(42).send(b"x")
        await anext(messages)
    return time.monotonic() - begin


async def measure(minutes: float, seed: int, names: list[str], *, together: bool) -> bool:
    """Attack each door in turn, or all at once; whether all went well."""
    with tempfile.TemporaryDirectory() as name:
        folder, well = Path(name) / "run", True
        make_authority(Path(name) / "strangers")
        stranger = issue(Path(name) / "strangers", "client", Path(name) / "own")
        options = UpOptions(
            proxies=1, gateways=1, brokers=1, broker_replicas=1, routers=1, router_replicas=1, relays=0, xius=0, pis=0,
            mqtt_port=0, zookeeper_port=0, data=folder, secure=True, settings=make_demo(folder / "secure"),
        )  # fmt: skip
        cluster = LocalCluster(options)
        await cluster.start()
        try:
            pids = {name: child.process.pid for name, child in cluster.children.items() if child.process is not None}
            chosen = [door for door in doors(cluster) if door.name in names]
            for group in [chosen] if together else [[door] for door in chosen]:
                await asyncio.gather(*(Attack(door, seed, stranger).run(60 * minutes) for door in group))
                took = await served(cluster, folder)
                now = {name: child.process.pid for name, child in cluster.children.items() if child.process is not None}
                same, texts = pids == now, {path.name: path.read_text(errors="replace") for path in (folder / "logs").glob("*.log")}
                tracebacks = [name for name, text in texts.items() if "Traceback" in text]
                well = well and same and not tracebacks
                for door in group:
                    print(door.told(), flush=True)
                print(
                    f"{'all alive' if same else 'a process has ended'} | tracebacks: {', '.join(tracebacks) or 'none'} | "
                    f"served in {took:.2f} s | logs of {sum(len(text) for text in texts.values()) / 1024:.0f} KiB",
                    flush=True,
                )
        finally:
            await cluster.stop()
            for path in (folder / "logs").glob("*.log"):
                _, found, rest = path.read_text(errors="replace").partition("Traceback")
                if found:
                    print(f"{path.name}: {found}{rest[:3000]}", flush=True)
            tls.use(None)
        return well


def main() -> int:
    """Attack and print. Exit code 1 when something ended or left a traceback."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="all doors at once")
    parser.add_argument("--doors", default=",".join(NAMES))
    args = parser.parse_args()
    return int(not asyncio.run(measure(args.minutes, args.seed, args.doors.split(","), together=args.together)))


if __name__ == "__main__":
    sys.exit(main())
