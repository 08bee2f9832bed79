"""How many deliveries a CPU second of the servers are there through the whole chain, beside Mosquitto and NATS?

MQTT in, gateway, proxy, broker, gateway, MQTT out: four hops in four processes (and an idle router) against one process
of a peer. The same closed-loop generator loads each in turn, in the same minutes; its CPU is not counted, and it uses
less than one core. QoS 0, 100 bytes.

Estimate before it was built: fan-out to 100 costs about 40 µs in the gateway and 10 µs in proxy and broker a message, and
joining makes ten or more messages share a write: 2,000,000 a CPU second, fifteen times Mosquitto and two to three
times NATS. One to one every hop works for one delivery: 150,000, once Mosquitto and a quarter of NATS.

What guards it costs (`--guarded`): tags of datagrams, with a ring of keys, less than 10 % of the chain's CPU, because a tag takes
2 µs for a datagram of some dozens of messages; TLS about 10 µs for each write to a client, in asyncio, and 2 µs in Mosquitto.

    python -m benchmarks.chain [--seconds 5] [--rounds 2] [--guarded] [--no-peers] [--case "one to one"] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.harness import build, builds, cluster, free_port, load, peer
from registry.keys import add_key, use_key
from registry.pki import issue, make_authority

CASES: dict[str, dict[str, int]] = {
    "fan-out to 100": {"groups": 1, "members": 100, "window": 32},
    "fan-out to 1000": {"groups": 1, "members": 1000, "window": 8},
    "100 rooms of 10": {"groups": 100, "members": 10, "window": 4, "publishers": 4},
    "one to one": {"groups": 1, "members": 1, "window": 256},
}
Results = dict[str, dict[str, list[dict[str, float]]]]


async def measure(name: str, ports: list[int], pids: list[int], seconds: float, topic: str, results: Results, ca: str = "") -> None:
    """Every case once against one server; by TLS those of one topic."""
    for case in results:
        options: dict[str, object] = {**CASES[case], **({"ca": ca} if ca else {})}
        if ca and CASES[case]["groups"] > 1:
            continue
        results[case].setdefault(name, []).append(await load(ports, pids, seconds=seconds, topic=topic, **options))


async def one_round(seconds: float, results: Results, with_peers: bool = True) -> None:
    """Pixiu, plain Pixiu where this is the compiled one, Mosquitto and NATS in turn."""
    for name, switch in builds():
        with build(switch):
            async with cluster() as running:
                await measure(name, running.mqtt_ports, running.servers, seconds, "room/{}", results)
    if not with_peers:
        return
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        config = Path(folder) / "mosquitto.conf"
        config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n")
        with peer(["mosquitto", "-c", str(config)], port) as pid:
            if pid is not None:
                await measure("mosquitto", [port], [pid], seconds, "room/{}", results)
        port = free_port()
        config = Path(folder) / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{free_port()}"\nserver_name: bench\njetstream {{ store_dir: "{folder}/js" }}\n'
            f'mqtt {{ listen: "127.0.0.1:{port}" }}\n'
        )
        with peer(["nats-server", "-c", str(config)], port) as pid:
            if pid is not None:
                await measure("nats", [port], [pid], seconds, "room/{}", results)


async def guarded_round(seconds: float, results: Results) -> None:
    """Pixiu as it is, with tags on datagrams, and by TLS; Mosquitto by TLS."""
    with tempfile.TemporaryDirectory() as name:
        folder, topic = Path(name), "room/{}"
        make_authority(folder / "ca")
        pem, ca = issue(folder / "ca", "gateway", folder / "tls", hosts=("127.0.0.1",)), str(folder / "tls/ca.pem")
        add_key(folder / "keys")
        use_key(folder / "keys")
        async with cluster() as running:
            await measure("pixiu", running.mqtt_ports, running.servers, seconds, topic, results)
        async with cluster(settings=(f"cluster.key_dir={folder / 'keys'}",)) as running:
            await measure("pixiu, tags", running.mqtt_ports, running.servers, seconds, topic, results)
        async with cluster(settings=(f"gateway.tls_certificate={pem}",)) as running:
            await measure("pixiu, TLS", running.mqtt_ports, running.servers, seconds, topic, results, ca)
        for kind, more in (("mosquitto", ""), ("mosquitto, TLS", f"certfile {pem}\nkeyfile {pem}\n")):
            port, config = free_port(), folder / "mosquitto.conf"
            config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\nuser root\n{more}")
            with peer(["mosquitto", "-c", str(config)], port) as pid:
                if pid is not None:
                    await measure(kind, [port], [pid], seconds, topic, results, ca if more else "")


def main() -> int:
    """Measure and print. Exit code 1 when anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-peers", action="store_true", help="Pixiu only: the compiled build and plain Python in turn")
    parser.add_argument("--guarded", action="store_true", help="what tags and TLS cost")
    parser.add_argument("--case", choices=tuple(CASES), action="append", help="only this one; may be given again")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: Results = {case: {} for case in args.case or CASES}
    for _ in range(args.rounds):
        asyncio.run(guarded_round(args.seconds, results) if args.guarded else one_round(args.seconds, results, not args.no_peers))
    if args.json:
        print(json.dumps(results))
    else:
        Console().print(table(results))
    return int(any(run["lost"] for servers in results.values() for runs in servers.values() for run in runs))


def table(results: Results) -> Table:
    """Medians of the rounds."""
    shown = Table("case", "server", "deliveries / CPU s", "ratio", "deliveries / s", "lost", "load's CPU")
    for case, servers in results.items():
        ours = median(run["per_cpu_s"] for run in servers["pixiu"])
        for name, runs in servers.items():
            per_cpu = median(run["per_cpu_s"] for run in runs)
            wall = median(run["deliveries"] / run["seconds"] for run in runs)
            share = median(run["load_cpu_s"] / run["seconds"] for run in runs)
            lost = sum(run["lost"] for run in runs)
            shown.add_row(case, name, f"{per_cpu:,.0f}", f"{ours / per_cpu:.2f}", f"{wall:,.0f}", f"{lost:.0f}", f"{share:.0%}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
