"""Results of every case at every server, round by round: medians, ratios, and doubts. Pure.

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Final

from comparison.cases import CASES, Case
from comparison.processes import switched

OURS: Final = "pixiu"
LOAD_LIMIT: Final = 0.8
"""Share of a core above which the load may limit a closed case."""
OTHERS_LIMIT: Final = 0.25
"""Cores that others may use on the machine before the clock's figures are doubted."""
LATE_LIMIT_MS: Final = 2.0
"""Delay above which an open load that sends late adds its own delay to the latencies."""
SUMS: Final = ("published", "deliveries", "lost", "repeated", "disordered")


@dataclass(frozen=True, slots=True)
class Sample:
    """One case at one server in one round."""

    round: int = 0
    published: float = 0.0
    deliveries: float = 0.0
    per_second: float = 0.0
    """Deliveries by the clock; for connections, connections."""
    server_cpu_s: float = 0.0
    """CPU of all processes of the server."""
    per_cpu: float = 0.0
    """Deliveries, or connections, a CPU second of the server."""
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    confirmed_p50_ms: float = 0.0
    """Mail: time until a whole window is confirmed."""
    confirmed_p99_ms: float = 0.0
    lost: float = 0.0
    repeated: float = 0.0
    disordered: float = 0.0
    memory_bytes: float = 0.0
    """Memory of all processes at the end of the case, with the load's connections open; for connections, the increase by one."""
    load_share: float = 0.0
    """Share of one core that the load used."""
    late_p99_ms: float = 0.0
    """Delay of an open load's sending."""
    others_cores: float = 0.0
    """Cores that neither the server nor the load used."""
    server_cores: float = 0.0
    """Cores that the server used."""
    processes: float = 0.0
    switches_per_s: float = 0.0
    """Voluntary context switches of the server's threads."""
    start_s: float = 0.0
    """At rest: time from the start until the server was ready."""
    hops: dict[str, float] = field(default_factory=dict)
    """CPU seconds of each kind of the server's processes, in sum `server_cpu_s`."""


FIGURES: Final = tuple(one.name for one in fields(Sample) if one.name not in ("round", "hops"))


@dataclass(frozen=True, slots=True)
class Looked:
    """State of the servers and the machine before or after a case."""

    server_cpu_s: Mapping[str, float]
    """CPU seconds by kind of process."""
    machine_cpu_s: float
    load_cpu_s: float
    memory_bytes: float
    at_s: float
    processes: int = 0
    switches: Mapping[int, int] = field(default_factory=dict)
    """Voluntary context switches by thread."""


def sample_of(case: Case, said: Mapping[str, float], before: Looked, after: Looked) -> Sample:
    """Make a sample from a load's report and the states before and after. Raises ValueError for an unknown figure in the report."""
    unknown = set(said) - set(FIGURES)
    if unknown:
        raise ValueError(f"a load said {', '.join(sorted(unknown))}, which nobody knows")
    hops = {name: now - before.server_cpu_s.get(name, 0.0) for name, now in after.server_cpu_s.items()}
    used, wall = sum(hops.values()), max(after.at_s - before.at_s, 1e-9)
    others = (after.machine_cpu_s - before.machine_cpu_s) - used - (after.load_cpu_s - before.load_cpu_s)
    memory = after.memory_bytes
    deliveries = said.get("deliveries", 0.0)
    if case.kind == "connections":
        memory = max(after.memory_bytes - before.memory_bytes, 0.0) / max(deliveries, 1.0)
    figures = {**said, "server_cpu_s": used, "per_cpu": deliveries / used if used > 0 else 0.0, "memory_bytes": memory}
    return Sample(
        0, **figures, others_cores=max(others / wall, 0.0), hops=hops, server_cores=used / wall, processes=after.processes,
        switches_per_s=switched(before.switches, after.switches) / wall,
    )  # fmt: skip


Results = dict[str, dict[str, list[Sample]]]
"""Case → server → its rounds."""


def middle(samples: Sequence[Sample]) -> Sample:
    """Return the median of each figure; sums for sent messages, for errors, so that no round's loss is hidden, and for hops."""
    hops = {name: sum(sample.hops.get(name, 0.0) for sample in samples) for sample in samples[:1] for name in sample.hops}
    rows = [asdict(sample) for sample in samples]
    return Sample(0, **{key: (sum if key in SUMS else median)(row[key] for row in rows) for key in FIGURES}, hops=hops)


def ratios(servers: Mapping[str, Sequence[Sample]], figure: str = "per_cpu") -> dict[str, tuple[float, float, float]]:
    """Return peer → (median, lowest, highest) of our figure divided by theirs. Each round is compared with itself, because
    events on the machine then affect both. Empty if we were not measured; a round in which either has no figure is left out."""
    found = {}
    for name, samples in servers.items():
        if name == OURS:
            continue
        by_round = {sample.round: getattr(sample, figure) for sample in samples}
        pairs = [(getattr(sample, figure), by_round.get(sample.round, 0.0)) for sample in servers.get(OURS, ())]
        each = [mine / theirs for mine, theirs in pairs if mine and theirs]
        if each:
            found[name] = (median(each), min(each), max(each))
    return found


def cpu_us(sample: Sample) -> dict[str, float]:
    """Return the CPU microseconds that each kind of process spent on a published message, or a connection."""
    return {name: used / sample.published * 1e6 for name, used in sample.hops.items()} if sample.published else {}


def wrong(results: Results, servers: str = "") -> list[str]:
    """Return a line for each case and server with lost, repeated or disordered messages, for servers whose names begin with
    `servers`."""
    found = []
    for case, at in results.items():
        for name in (name for name in at if name.startswith(servers)):
            one = middle(at[name])
            counts = [f"{getattr(one, key):,.0f} {key}" for key in ("lost", "repeated", "disordered") if getattr(one, key)]
            if counts:
                found.append(f"{case}, {name}: {', '.join(counts)} of {one.deliveries + one.lost:,.0f}")
    return found


def doubts(results: Results) -> list[str]:
    """Return the reasons to doubt figures: one line for each."""
    rows = [(case, name, middle(samples)) for case, servers in results.items() for name, samples in servers.items()]
    found = []
    closed = [f"{case}, {name}" for case, name, one in rows if one.load_share > LOAD_LIMIT and not CASES[case].rate]
    if closed:
        found.append(f"the load used more than {LOAD_LIMIT:.0%} of a core and may limit the rate by the clock: {'; '.join(closed)}")
    late = [f"{case}, {name} ({one.late_p99_ms:.1f} ms)" for case, name, one in rows if one.late_p99_ms > LATE_LIMIT_MS]
    if late:
        found.append(f"the load sent later than it should, which its latencies include: {'; '.join(late)}")
    cores = [one.others_cores for _, _, one in rows]
    if cores and median(cores) > OTHERS_LIMIT:
        found.append(
            f"others used {median(cores):.1f} cores of this machine (median of all cases), which rates by the clock and latencies "
            "suffer from; compare the work of a CPU second, and ratios"
        )
    return found
