"""Doublings under way in `pixiu status`: role, phase, and operator. Pure.

Source: docs/doubling.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from pixiu.discovery.view import View
from tools.cli.replicas import LEADING

OPEN = "open"


@dataclass(frozen=True, slots=True)
class DoublingStatus:
    """A role whose partitions are being doubled."""

    role: str
    n: int
    next: int
    phase: str
    """Phase that the running tool reports; empty: no tool is running."""
    operator: str = ""
    partitions: Mapping[int, str] = field(default_factory=dict)
    """For Xiu and Pi: partition → the phase in its leader's log, for partitions that have one."""

    def json(self) -> dict[str, object]:
        """Return values for JSON."""
        return {**asdict(self), "partitions": {str(p): phase for p, phase in sorted(self.partitions.items())}}

    def text(self) -> str:
        """Return one line for people."""
        numbers = f"{self.n} → {self.next} partitions" if self.next > self.n else f"to {self.n} partitions, committed"
        who = f"phase {self.phase}, by {self.operator}" if self.phase else f"no tool is at work: `pixiu double {self.role}` goes on"
        logs = ", ".join(f"{p} {phase}" for p, phase in sorted(self.partitions.items()))
        return f"doubling of {self.role}: {numbers}; {who}" + (f" (partitions: {logs})" if logs else "")


def tool_of(lock: bytes) -> dict[str, object]:
    """Parse the data of a running tool's lock; empty if it cannot be read."""
    try:
        said = json.loads(lock)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def phase_of(health: Mapping[str, object]) -> str:
    """The phase of its partition's doubling that a store's leader reports at /health; empty: none, or it does not lead."""
    service = health.get("service")
    replication = service.get("replication") if isinstance(service, dict) else None
    if not isinstance(service, dict) or not isinstance(replication, dict) or replication.get("state") != LEADING:
        return ""
    phase = service.get("doubling")
    return phase.lower() if isinstance(phase, str) and phase != "NONE" else ""


def doublings_of(
    view: View, logs: Iterable[tuple[str, int, str]], tools: Mapping[str, Mapping[str, object]]
) -> list[DoublingStatus]:
    """Find the roles that are being doubled: by the layout, by holders of role locks, and by the logs of stores.

    logs: (role, partition, phase) of partitions in a doubling. tools: role → the data of its lock.
    """
    phases: dict[str, dict[int, str]] = {}
    for role, partition, phase in logs:
        layout = view.layout.roles.get(role)
        # An open child serves: once the layout includes it, nothing is left to do for it.
        if phase != OPEN or layout is None or layout.next > layout.n:
            phases.setdefault(role, {})[partition] = phase
    found = []
    for role, layout in sorted(view.layout.roles.items()):
        if layout.next > layout.n or role in tools or role in phases:
            tool = tools.get(role, {})
            phase, operator = (str(tool.get(key, "")) for key in ("phase", "operator"))
            found.append(DoublingStatus(role, layout.n, layout.next, phase, operator, phases.get(role, {})))
    return found
