"""The checks of `pixiu doctor`: each one is ok, a warning or a failure, and names the remedy. Pure.

Source: docs/operations.md, "Is it set up right?".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pixiu.discovery.agreement import disagreement, spoken
from pixiu.discovery.lacks import NO_LAYOUT, lacks
from pixiu.discovery.node import Node
from pixiu.discovery.view import View

MIB: Final = 1 << 20
DISK_LEAST_BYTES: Final = 256 * MIB
"""Free disk below which Xiu refuses writes by default (`xiu.reserve_mb`)."""
DISK_LOW_BYTES: Final = 2048 * MIB
DISK_LOW_SHARE: Final = 0.05
SHM_LEAST_BYTES: Final = 80 * MIB
"""Shared memory that one Xiu (`table_mb`) and one gateway (`signal_table_mb`) take by default."""
SHM_LOW_BYTES: Final = 256 * MIB
CLOCK_LOW_MS: Final = 500.0
"""Clock offset from which times of probes and traces mean little, and mail expires early or late."""
CLOCK_BAD_MS: Final = 30_000.0
"""Half of what stores tolerate: a SnowflakeID 60 s ahead is refused."""
FILES_LEAST: Final = 1024
FILES_LOW: Final = 65_536
HEADER_BYTES: Final = 48
"""Headers of IPv6 and UDP, before a link's own bytes."""
ZOOKEEPER_LEAST: Final = (3, 6)
MAX_NAMED: Final = 8
"""Maximum number of names in one finding."""
OPTIONAL: Final = ("bridge",)
"""Roles of which a layout need not say anything: whoever wants them starts them."""
LOOPBACK: Final = "lo"
IFF_UP: Final = 1

_VERSION: Final = re.compile(r"Zookeeper version: (\d+)\.(\d+)[.\d]*", re.ASCII)
_MODE: Final = re.compile(r"^Mode: (\w+)", re.ASCII | re.MULTILINE)


class Grade(Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    grade: Grade
    said: str
    do: str = ""
    """Remedy; empty if none is needed."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Another wall clock, compared with this machine's."""

    name: str
    offset_ms: float
    """Positive if the other clock is ahead."""
    uncertain_ms: float
    """Half of the round trip of the question."""


@dataclass(frozen=True, slots=True)
class Space:
    """A folder's file system, or that of its nearest parent that exists."""

    path: str
    free_bytes: int
    """Bytes available to this user."""
    total_bytes: int
    free_files: int
    """-1: no limit."""
    writable: bool


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface."""

    name: str
    mtu_bytes: int
    flags: int


def named(names: Iterable[str]) -> str:
    """Join the first names, and add how many more there are."""
    found = list(names)
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"{', '.join(found[:MAX_NAMED])}{more}"


def node_name(node: Node) -> str:
    """Name a process for people, with its address."""
    which = f"{node.role} {node.replica}" if node.partition < 0 else f"{node.role} {node.partition}/{node.replica}"
    return f"{which} at {node.address}"


def check_registry(answers: Mapping[str, str]) -> Finding:
    """Check the ZooKeeper servers. answers: address → the answer to `srvr`; empty: there was none."""
    silent = [address for address, answer in answers.items() if not answer]
    modes = {address: mode[1] for address, answer in answers.items() if (mode := _MODE.search(answer))}
    versions = {f"{found[1]}.{found[2]}": (int(found[1]), int(found[2])) for a in answers.values() if (found := _VERSION.search(a))}
    if len(silent) == len(answers):
        return Finding("registry", Grade.FAILURE, f"no ZooKeeper answers at {named(answers)}", "start it, or correct --target")
    said = ", ".join(f"{address} {modes.get(address, 'is there')}" for address in answers if address not in silent)
    said = f"ZooKeeper {' and '.join(sorted(versions)) or 'of unknown version'}: {said}"
    if any(version < ZOOKEEPER_LEAST for version in versions.values()):
        return Finding("registry", Grade.FAILURE, said, "use ZooKeeper 3.6 or newer")
    alone = [address for address, mode in modes.items() if mode == "standalone"]
    if alone and len(answers) > 1:
        return Finding(
            "registry", Grade.FAILURE, said, f"{named(alone)} is not part of an ensemble: correct its servers or --target"
        )
    if silent:
        return Finding("registry", Grade.WARNING, f"{said}; {named(silent)} does not answer", "start it, or correct --target")
    if not modes:
        return Finding("registry", Grade.WARNING, said, "allow its command srvr: 4lw.commands.whitelist=srvr")
    if alone and not alone[0].startswith(("127.", "localhost")):
        return Finding("registry", Grade.WARNING, said, "while it is down nobody can join or be elected: run three")
    return Finding("registry", Grade.OK, said)


def check_layout(view: View) -> Finding:
    """Check the layout, and that exactly the wanted processes run."""
    if not view.layout.version:
        return Finding("layout", Grade.FAILURE, "the registry holds no layout", NO_LAYOUT.rpartition("? ")[2])
    strangers = [
        node_name(node)
        for node in view.nodes
        if node.role not in OPTIONAL
        and ((role := view.layout.roles.get(node.role)) is None or (node.partition >= 0 and node.partition >= role.next))
    ]
    if strangers:
        return Finding(
            "layout", Grade.FAILURE, f"not in the layout: {named(strangers)}", "end them, or add their role with `pixiu layout set`"
        )
    missing = lacks(view)
    if missing:
        wanting = all(lack.running for lack in missing)
        do = f"start them, such as {missing[0].start()}"
        return Finding("layout", Grade.WARNING if wanting else Grade.FAILURE, named(map(str, missing)), do)
    doubled = [f"{role} from {one.n} to {one.next}" for role, one in view.layout.roles.items() if one.next != one.n]
    if doubled:
        return Finding("layout", Grade.WARNING, f"a doubling is under way: {named(doubled)}", "wait for its end: `pixiu status`")
    return Finding("layout", Grade.OK, f"version {view.layout.version}: all of {len(view.layout.roles)} roles are Running")


def _processes(view: View) -> int:
    return len({node.process for node in view.nodes})


def check_versions(view: View) -> Finding:
    """Check that all processes have one version."""
    found: dict[str, list[str]] = {}
    for node in view.nodes:
        found.setdefault(node.version, []).append(node_name(node))
    if len(found) > 1:
        said = "; ".join(f"{version}: {named(nodes)}" for version, nodes in sorted(found.items()))
        return Finding("versions", Grade.WARNING, said, "finish the upgrade: `pixiu status --json` shows versions")
    return Finding("versions", Grade.OK, f"{_processes(view)} processes of {next(iter(found), 'no version')}")


def check_settings(view: View) -> Finding:
    """Check that all processes agree where they must: protocol versions, cluster settings."""
    found: dict[tuple[object, ...], list[Node]] = {}
    for node in view.nodes:
        said = node.protocol_min, node.protocol_max, node.wire_hash
        found.setdefault(said, []).append(node)
    groups = sorted(found.values(), key=len)
    for few in groups:
        for others in reversed(groups):
            if problem := disagreement(few[0], others[0]):
                return Finding(
                    "settings", Grade.FAILURE, f"{named(map(node_name, few))}: other cluster settings than the rest", problem
                )
    return Finding(
        "settings", Grade.OK, f"all processes agree on the cluster settings, and speak protocol version {spoken(view.nodes)}"
    )


def check_bridges(view: View) -> list[Finding]:
    """Check that all processes of bridges have the same ones. Empty: there are none."""
    found: dict[str, list[str]] = {}
    for node in view.nodes:
        if node.role == "bridge":
            found.setdefault(node.files_digest, []).append(node_name(node))
    if len(found) > 1:
        said = f"processes with different bridges: {'; '.join(named(nodes) for nodes in found.values())}"
        return [Finding("bridges", Grade.WARNING, said, "give all the same files, and restart those with an old one")]
    return [Finding("bridges", Grade.OK, f"all of {len(nodes)} processes have the same") for nodes in found.values()]


def check_answers(view: View, silent: Mapping[int, str]) -> Finding:
    """Check that this machine reaches every process. silent: endpoint → the reason for no answer."""
    wrong = [f"{node_name(node)} ({silent[node.endpoint]})" for node in view.nodes if node.endpoint in silent]
    if wrong:
        return Finding(
            "answers",
            Grade.FAILURE,
            f"no answer by HTTP from {named(wrong)}",
            "was it killed, does it hang, or is a firewall between?",
        )
    return Finding("answers", Grade.OK, f"all {_processes(view)} processes answer at their HTTP ports")


def check_clocks(clocks: Sequence[Clock]) -> Finding:
    """Compare the wall clocks of processes and of ZooKeeper with this machine's."""
    if not clocks:
        return Finding("clocks", Grade.WARNING, "no other clock could be read", "compare them by hand: chronyc tracking")
    sure = {clock.name: max(abs(clock.offset_ms) - clock.uncertain_ms, 0.0) for clock in clocks}
    worst = max(clocks, key=lambda clock: sure[clock.name])
    off = [
        f"{clock.name} {clock.offset_ms / 1000:+.1f} s"
        for clock in sorted(clocks, key=lambda clock: -sure[clock.name])
        if sure[clock.name] > CLOCK_LOW_MS
    ]
    if off:
        grade = Grade.FAILURE if sure[worst.name] > CLOCK_BAD_MS else Grade.WARNING
        return Finding("clocks", grade, f"against this machine: {named(off)}", "synchronise all machines by NTP: chronyc tracking")
    return Finding(
        "clocks", Grade.OK, f"{len(clocks)} clocks within {max(CLOCK_LOW_MS, worst.uncertain_ms):.0f} ms of this machine's"
    )


def check_space(space: Space) -> Finding:
    """Check the free disk space for data directories."""
    check = f"disk {space.path}"
    share = space.free_bytes / max(space.total_bytes, 1)
    said = f"{space.free_bytes // MIB:,} MiB free, {share:.0%}"
    if not space.writable:
        return Finding(check, Grade.FAILURE, "cannot be written to", "give the processes' user the right to write there")
    if space.free_files == 0:
        return Finding(check, Grade.FAILURE, f"{said}, but no file can be made: no inode is free", "remove files")
    if space.free_bytes < DISK_LEAST_BYTES:
        return Finding(check, Grade.FAILURE, said, "free some: Xiu refuses writes (xiu.reserve_mb)")
    if space.free_bytes < DISK_LOW_BYTES or share < DISK_LOW_SHARE:
        return Finding(check, Grade.WARNING, said, "free some: a repair of a Xiu needs as much as its store has")
    return Finding(check, Grade.OK, said)


def check_shared_memory(space: Space) -> Finding:
    """Check the free shared memory for tables."""
    said = f"{space.free_bytes // MIB:,} MiB free"
    if not space.writable:
        return Finding("shared memory", Grade.FAILURE, f"{space.path} cannot be written to", "mount a tmpfs there")
    do = f"remove {space.path}/pixiu-* of gateways and stores that are gone for good, or enlarge it (a container: --shm-size)"
    if space.free_bytes < SHM_LEAST_BYTES:
        return Finding("shared memory", Grade.FAILURE, f"{said}: a Xiu and a gateway take {SHM_LEAST_BYTES // MIB} MiB", do)
    return Finding(
        "shared memory",
        Grade.WARNING if space.free_bytes < SHM_LOW_BYTES else Grade.OK,
        said,
        do if space.free_bytes < SHM_LOW_BYTES else "",
    )


def check_buffers(limits: Mapping[str, int], wanted_bytes: int) -> Finding:
    """Check the kernel's limits of socket buffers. limits: net.core.… → bytes; wanted: `receive_buffer_bytes` of the processes."""
    if not limits:
        return Finding("socket buffers", Grade.WARNING, "the kernel's limits cannot be read", "sysctl net.core.rmem_max")
    said = ", ".join(f"{name} {value:,}" for name, value in limits.items())
    low = [name for name, value in limits.items() if value < wanted_bytes]
    if low:
        settings = " ".join(f"{name}={wanted_bytes}" for name in low)
        do = f"sysctl -w {settings}: bursts of datagrams are lost in a smaller buffer (receive_buffer_bytes)"
        return Finding("socket buffers", Grade.WARNING, said, do)
    return Finding("socket buffers", Grade.OK, said)


def check_mtu(interfaces: Sequence[Interface], mtu_bytes: int, loopback_mtu_bytes: int) -> Finding:
    """Check that datagrams pass unfragmented through every interface that is up."""
    up = [one for one in interfaces if one.flags & IFF_UP]
    if not up:
        return Finding("mtu", Grade.WARNING, "no network interface can be read", "ip link")
    small = {
        one.name: wanted
        for one in up
        if one.mtu_bytes < (wanted := (loopback_mtu_bytes if one.name == LOOPBACK else mtu_bytes) + HEADER_BYTES)
    }
    said = ", ".join(f"{one.name} {one.mtu_bytes}" for one in up[:MAX_NAMED])
    if small:
        name, wanted = next(iter(small.items()))
        key = "loopback_mtu_bytes" if name == LOOPBACK else "mtu_bytes"
        do = f"ip link set {name} mtu {wanted}, or on all machines a smaller [cluster] {key}: else each datagram is cut in pieces"
        return Finding("mtu", Grade.WARNING, said, do)
    return Finding("mtu", Grade.OK, said)


def check_open_files(soft: int) -> Finding:
    """Check the limit of open files, and so of connections, for a process started like this one; -1: no limit."""
    said = f"{soft:,}" if soft >= 0 else "no limit"
    if 0 <= soft < FILES_LEAST:
        return Finding("open files", Grade.FAILURE, said, f"ulimit -n {FILES_LOW}, or LimitNOFILE={FILES_LOW} in the unit")
    if 0 <= soft < FILES_LOW:
        do = f"a gateway needs one for each client: ulimit -n {FILES_LOW}, or LimitNOFILE={FILES_LOW} in the unit"
        return Finding("open files", Grade.WARNING, said, do)
    return Finding("open files", Grade.OK, said)


def check_java(found: str, problem: str) -> Finding:
    """Check the Java for an embedded ZooKeeper. found: its version and path; problem: why there is none."""
    if problem:
        return Finding(
            "java", Grade.WARNING, problem, "`pixiu up`, `pixiu zookeeper` and Spark need it; a ZooKeeper of your own does not"
        )
    return Finding("java", Grade.OK, found)
