"""The entry point of `pixiu bench --peers`, found by the entry-point group `pixiu.bench`.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Sequence
from typing import Final

from comparison.cases import CASES, Case
from comparison.ours import LAYOUTS
from comparison.report import as_json, machine, missing_lines, notes, render, render_hops, render_idle
from comparison.results import OURS, doubts, wrong
from comparison.servers import PEERS
from comparison.suite import run
from pixiu.errors import InvalidArgument
from tools.cli.output import console, error_console, print_json

DEFAULT_SECONDS: Final = 3.0
MIN_SECONDS: Final = 0.2
MAX_SECONDS: Final = 600.0
MAX_ROUNDS: Final = 100


def chosen(wanted: Sequence[str], known: Sequence[str], option: str) -> list[str]:
    """Return the named items, in the order of all, or all. Raises InvalidArgument for an unknown name."""
    for name in wanted:
        if name not in known:
            raise InvalidArgument(f"{option} {name}: one of {', '.join(known)}")
    return [name for name in known if name in wanted or not wanted]


def plan(cases: Sequence[str], servers: Sequence[str], rounds: int, seconds: float) -> tuple[list[Case], list[str]]:
    """Return the requested (cases, servers); Pixiu is always among the servers. Raises InvalidArgument."""
    if not 1 <= rounds <= MAX_ROUNDS:
        raise InvalidArgument(f"--rounds {rounds}: 1 to {MAX_ROUNDS}")
    if not (math.isfinite(seconds) and MIN_SECONDS <= seconds <= MAX_SECONDS):
        raise InvalidArgument(f"--for {seconds:g}: {MIN_SECONDS:g} to {MAX_SECONDS:g} seconds a case")
    names = chosen(servers, [OURS, *PEERS], "--server")
    return [CASES[name] for name in chosen(cases, list(CASES), "--case")], names if OURS in names else [OURS, *names]


def compare(cases: Sequence[str], servers: Sequence[str], rounds: int, seconds: float, layout: str, json: bool) -> int:
    """Measure and print. Returns 1 when Pixiu lost, repeated or disordered anything, or a server failed. A peer that is not
    installed is named and left out.

    Args:
        cases, servers: names; empty: all.
        seconds: duration of each case at each server in each round; 0: three.
        layout: of Pixiu, one of `LAYOUTS`; empty: what `pixiu up` does by default.
    """
    if layout:
        chosen([layout], list(LAYOUTS), "--layout")
    work, names = plan(cases, servers, rounds, seconds or DEFAULT_SECONDS)
    wanted = [PEERS[name] for name in names if name != OURS]
    found = [peer for peer in wanted if peer.found]
    errors = error_console()
    for line in missing_lines(wanted):
        errors.print(line, highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        errors.print(text, highlight=False, soft_wrap=True)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: every started server is ended
    try:
        names = [OURS, *(peer.name for peer in found)]
        results, failures = asyncio.run(run(work, names, rounds, seconds or DEFAULT_SECONDS, layout, say))
    finally:
        signal.signal(signal.SIGTERM, before)
    where = machine(found, layout)
    if json:
        print_json(as_json(results, where, failures, {peer.name: peer.install for peer in wanted if not peer.found}))
    else:
        out = console()
        out.print(where.line, highlight=False, soft_wrap=True)
        for table in (render(results), render_idle(results), render_hops(results)):
            if table.row_count:
                out.print(table)
        titled = (("note", notes(results)), ("wrong", wrong(results)), ("doubt", doubts(results)), ("failed", failures))
        for line in (f"{title}: {line}" for title, lines in titled for line in lines):
            out.print(line, highlight=False, soft_wrap=True)
    return int(bool(wrong(results, OURS) or failures))
