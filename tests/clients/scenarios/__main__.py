"""Play the scenarios of `sdk/scenarios.md` with an SDK's driver, and print what failed.

python -m tests.clients.scenarios --language go
python -m tests.clients.scenarios --language go 'inbox/*' topics/exists
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pixiu
from pixiu.rpc import tls
from tests.clients.scenarios.driver import LANGUAGES, Driver, Language
from tests.clients.scenarios.favours import Favours
from tests.clients.scenarios.table import Scenario, scenarios
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.shared_zookeeper import end_shared_server

TWO: Final = tuple(f"--{each}=2" for each in ("proxies", "gateways", "brokers", "routers", "relays", "xius", "pis", "topics"))
ONE: Final = tuple(f"--{each}=1" for each in ("proxies", "gateways", "brokers", "routers", "relays", "xius", "pis"))
RESTARTS: Final = ("HUNG", "the driver ended", "no verdict")


@contextlib.contextmanager
def secured(cluster: LocalCluster) -> Iterator[dict[str, str]]:
    """The environment of a driver at a cluster of `pixiu up --secure`; the harness itself is an operator there."""
    folder = cluster.folder / "run"
    tls.use(tls.Tls(folder / "tls", tls.OPERATOR))
    try:
        yield {"PIXIU_CA": str(folder / "listeners/ca.pem"), "PIXIU_TOKEN": (folder / "secure/token").read_text().strip()}
    finally:
        tls.use(None)


async def play(language: Language, cluster: LocalCluster, wanted: list[Scenario], environment: dict[str, str]) -> dict[str, str]:
    """Play scenarios one after the other. Returns name → "ok", or what does not hold."""

    def connect(uin: int) -> pixiu.Client:
        return pixiu.connect(cluster.target, uin=uin, ca=environment.get("PIXIU_CA"), token=environment.get("PIXIU_TOKEN"))

    found: dict[str, str] = {}
    left = list(wanted)
    target = proxies(cluster) if environment else cluster.target
    while left:
        async with Driver(language, target, environment) as driver:
            while left:
                scenario = left.pop(0)
                began, seed = time.monotonic(), time.time_ns() // 1_000_000 * 1_000
                async with Favours(cluster, connect) as favours:
                    found[scenario.name] = await driver.play(scenario.name, seed, favours)
                print(f"{time.monotonic() - began:6.1f} s  {scenario.name}: {found[scenario.name]}", flush=True)
                if found[scenario.name].startswith(RESTARTS):
                    break
    return found


def proxies(cluster: LocalCluster) -> str:
    """A target that names the proxies."""
    return ",".join(process["client_address"] for process in cluster.processes("proxy"))


def main() -> int:
    """Play what the command line names. Returns 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--language", choices=sorted(LANGUAGES), required=True)
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of scenarios, such as 'inbox/*'")
    arguments = parser.parse_args()
    language = LANGUAGES[arguments.language]
    language.prepare()
    wanted = [each for each in scenarios() if any(fnmatch(each.name, pattern) for pattern in arguments.patterns)]
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        try:
            if usual := [each for each in wanted if each.cluster != "secure"]:
                (Path(name) / "usual").mkdir()
                with running_cluster(Path(name) / "usual", *TWO, layout="separate") as cluster:
                    cluster.wait_healthy()
                    found |= asyncio.run(play(language, cluster, usual, {}))
            if secure := [each for each in wanted if each.cluster == "secure"]:
                (Path(name) / "secure").mkdir()
                with running_cluster(Path(name) / "secure", "--secure", *ONE) as cluster, secured(cluster) as environment:
                    found |= asyncio.run(play(language, cluster, secure, environment))
        finally:
            end_shared_server()
    bad = {name: why for name, why in found.items() if why != "ok"}
    print(f"{len(found) - len(bad)} of {len(found)} hold", *(f"{name}: {why}" for name, why in bad.items()), sep="\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
