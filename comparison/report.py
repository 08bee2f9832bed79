"""A comparison as a table for people and as JSON for programs.

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.table import Table

from cluster.core.compiled import build_of_new_process
from comparison.cases import CASES
from comparison.results import OURS, Results, cpu_us, doubts, middle, ratios, wrong
from comparison.servers import Peer
from pixiu.version import __version__

COLUMNS: Final = ("a second", "a CPU second", "pixiu ×", "", "p50", "p99", "lost", "repeated", "disorder", "memory", "load")
"""Columns after the case and the server; the unnamed one has the lowest and the highest round's ratio."""
IDLE_COLUMNS: Final = ("processes", "of a core", "switches a second", "memory", "start")
NOTES: Final = (
    "a second, a CPU second: deliveries, or connections, by the clock and by the CPU of all the server's processes",
    "pixiu ×: deliveries a CPU second by the peer's, the median of the rounds (lowest, highest)",
    "memory: of all the server's processes; of connections, what one added. load: the part of a core that the load used",
    "subscribers ask every server for QoS 0, for mail for QoS 1; where another is granted the case fails",
)
IDLE_NOTE: Final = (
    "at rest: a fresh server, and of Pixiu `pixiu up` without counts; switches: voluntary context switches of its threads; start: "
    "until every process of Pixiu is Running, or a peer's port answers"
)
SYNCS: Final = {
    OURS: "on two replicas' disks, synced",
    "mosquitto": "in memory",
    "mosquitto-nodelay": "in memory",
    "nats": "in a file that is synced every two minutes",
    "rabbitmq": "in a file, synced",
    "jetstream": "in a file that is synced every two minutes",
    "rabbitmq-amqp": "in a file, synced",
    "rabbitmq-quorum": "in a log of one member, synced",
}
TOPICS_NOTE: Final = (
    "topics: synced: confirmed when it is on the disk of one replica, but by jetstream and kafka without `-synced` when the server "
    "has taken it, as in the other cases"
)
"""Place of mail when it is confirmed, for each server as shipped."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the measurement."""

    processor: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    versions: dict[str, str]
    """Versions of the measured servers."""

    @property
    def line(self) -> str:
        """Describe the machine in one line."""
        found = ", ".join(f"{name} {version or '(unknown version)'}" for name, version in self.versions.items())
        return (
            f"{self.cores} cores ({self.processor}), {self.memory_gib:.0f} GiB, {self.kernel}, Python {self.python}; {found}; "
            "load and servers on this one machine"
        )


def processor_in(text: str) -> str:
    """Return the name of the processor in the text of /proc/cpuinfo; empty if there is none."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def machine(peers: Sequence[Peer], layout: str) -> Machine:
    """Describe this machine, and the versions of servers; of Pixiu also the build, and the layout if one was chosen."""
    ours = ", ".join(filter(None, (build_of_new_process().name, layout)))
    return Machine(
        processor_in(Path("/proc/cpuinfo").read_text()) or platform.machine(),
        len(os.sched_getaffinity(0)),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30),
        f"{platform.system()} {platform.release()}",
        platform.python_version(),
        {OURS: f"{__version__} ({ours})"} | {peer.name: peer.version() for peer in peers},
    )


def as_times(value: float) -> str:
    """Format milliseconds; empty if nothing was timed."""
    return (f"{value:,.1f} ms" if value >= 1 else f"{value:.2f} ms") if value else ""


def as_bytes(value: float) -> str:
    """Format bytes as KiB or MiB; empty if there is no figure."""
    if not value:
        return ""
    return f"{value / 1024:,.1f} KiB" if value < 1 << 20 else f"{value / (1 << 20):,.0f} MiB"


def as_ratio(value: float) -> str:
    """Format a ratio with its significant digits."""
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def render(results: Results) -> Table:
    """Render medians of the rounds; lost, repeated and disordered messages as sums."""
    table = Table(box=None, pad_edge=False)
    table.add_column("case")
    table.add_column("server")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for case, servers in ((case, servers) for case, servers in results.items() if CASES[case].kind != "idle"):
        beside = ratios(servers)
        shown = CASES[case].title
        for name, samples in servers.items():
            one, ratio = middle(samples), beside.get(name)
            wrongs = [f"[red]{count:,.0f}[/]" if count else "0" for count in (one.lost, one.repeated, one.disordered)]
            table.add_row(
                shown, name, f"{one.per_second:,.0f}", f"{one.per_cpu:,.0f}",
                as_ratio(ratio[0]) if ratio else "", f"({as_ratio(ratio[1])}, {as_ratio(ratio[2])})" if ratio else "",
                as_times(one.p50_ms), as_times(one.p99_ms), *wrongs, as_bytes(one.memory_bytes), f"{one.load_share:.0%}",
            )  # fmt: skip
            shown = CASES[case].size if shown == CASES[case].title else ""
        if len(servers) == 1:
            table.add_row(shown)
        table.add_section()
    return table


def render_idle(results: Results) -> Table:
    """Render what servers cost that nobody uses: medians of the rounds."""
    table = Table(title="at rest, without a client: less is better", box=None, pad_edge=False)
    table.add_column("server")
    for name in IDLE_COLUMNS:
        table.add_column(name, justify="right")
    for name, samples in results.get("idle", {}).items():
        one = middle(samples)
        table.add_row(
            name, f"{one.processes:,.0f}", f"{one.server_cores:.2%}", f"{one.switches_per_s:,.0f}", as_bytes(one.memory_bytes),
            f"{one.start_s:.2f} s",
        )  # fmt: skip
    return table


def render_hops(results: Results) -> Table:
    """Render the distribution of the CPU over a server's processes; every row adds up to the whole."""
    found = {
        (case, name): cpu_us(middle(samples)) for case, servers in results.items() for name, samples in servers.items() if samples
    }
    found = {key: hops for key, hops in found.items() if len(hops) > 1}
    kinds = list(dict.fromkeys(kind for hops in found.values() for kind in hops))
    table = Table(title="CPU µs a published message (deliveries are more), a connection or a mail", box=None, pad_edge=False)
    for name in ("case", "server"):
        table.add_column(name)
    for kind in (*kinds, "all"):
        table.add_column(kind, justify="right")
    for (case, name), hops in found.items():
        figures = [f"{hops[kind]:,.1f}" if kind in hops else "" for kind in kinds]
        table.add_row(f"{CASES[case].title}, {CASES[case].size}", name, *figures, f"{sum(hops.values()):,.1f}")
    return table


def notes(results: Results) -> list[str]:
    """Return notes for readers of the table."""
    mail = dict.fromkeys(name for case, servers in results.items() if CASES[case].kind == "mail" for name in servers)
    syncs = [f"{name}: {SYNCS[name]}" for name in mail if name in SYNCS]
    idle = [IDLE_NOTE] if results.get("idle") else []
    idle += [TOPICS_NOTE] if any(servers and CASES[case].kind == "topics" for case, servers in results.items()) else []
    return [*NOTES, *idle, *([f"where mail is when it is confirmed: {'; '.join(syncs)}"] if syncs else [])]


def missing_lines(peers: Sequence[Peer]) -> list[str]:
    """Return a line for each peer that is not installed."""
    return [f"{peer.name} is not installed and is left out; to have it: {peer.install}" for peer in peers if not peer.found]


def as_json(results: Results, where: Machine, failures: Sequence[str], missing: Mapping[str, str]) -> dict[str, object]:
    """Return everything, with every round, for JSON."""
    return {
        "machine": asdict(where),
        "not_installed": dict(missing),
        "cases": {
            case: {
                "title": CASES[case].title,
                "work": CASES[case].size,
                "qos": CASES[case].qos,
                "subscribed_qos": CASES[case].subscribed_qos,
                "servers": {
                    name: {
                        "median": asdict(middle(samples)),
                        "cpu_us": cpu_us(middle(samples)),
                        "rounds": [asdict(sample) for sample in samples],
                    }
                    for name, samples in servers.items()
                },
                "ratios_per_cpu": {
                    name: {"median": middle_one, "lowest": lowest, "highest": highest}
                    for name, (middle_one, lowest, highest) in ratios(servers).items()
                },
            }
            for case, servers in results.items()
        },
        "wrong": wrong(results),
        "doubts": doubts(results),
        "failures": list(failures),
    }
