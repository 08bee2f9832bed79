"""`pixiu double`: a role gets twice its partitions while messages flow.

Source: docs/doubling.md, docs/operations.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Annotated, Final

import typer

from ops.doubling.doubling import Phase, phases, start_commands
from ops.doubling.forecast import KEYS, Plan, mib
from ops.doubling.progress import Step
from ops.doubling.tool import DoublingTool, Result
from pixiu.discovery.reachable import check_reachable
from pixiu.discovery.target import names_registry, parse_address
from pixiu.discovery.view import Layout, RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError, InvalidArgument
from registry.session import registry_of
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, Yes, error_console, guarded, operator, print_json, print_result

STOP_VARIABLE: Final = "PIXIU_DOUBLE_KILLED_AFTER"
"""Test hook: the tool kills itself (SIGKILL) after its first step in this phase, or in the first of several (comma-separated)."""
SESSION_TIMEOUT_S: Final = 10.0


@guarded
def double(
    role: Annotated[str, typer.Argument(help="router, broker, relay, xiu or pi.")],
    to: Annotated[int, typer.Option(help="Number of partitions to reach; nothing is done if the role has it already.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done and what is missing; change nothing.")
    ] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Take back a doubling that has not split a partition yet.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete what moved although it could not be compared; what is lost then stays lost.")
    ] = False,
    yes: Yes = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which this run ends; another run continues.")] = 600.0,
    as_json: AsJson = False,
    target: Target = DEFAULT_TARGET,
) -> None:
    """Double the partitions of a role while messages flow. Exit code 0: done, 1: waits for what is missing, 2: refused.

    Run again, it goes on with what it or another one began.
    """
    if not names_registry(target):
        raise InvalidArgument(f"--target {target}: the layout is in the registry; give zk://HOST:PORT/ROOT")
    if as_json and not (yes or dry_run or abort):
        raise InvalidArgument("--json cannot ask: add --yes or --dry-run")
    check_reachable(target)
    run = _Run(role, to, target, as_json=as_json, force=force)
    done = asyncio.run(run.run(dry_run=dry_run, abort=abort, yes=yes, timeout_s=timeout))
    if not done:
        raise typer.Exit(1)


async def planned(target: str, role: str) -> dict[str, object]:
    """The plan of a doubling with its forecast, as `--dry-run --json` prints it. Raises `InvalidArgument`,
    `RegistryUnavailable`."""
    async with registry_of(target) as (zookeeper, root):
        tool = DoublingTool(zookeeper, root, role, operator=operator())
        try:
            layout, doubling, problems = await tool.look(0)
            there = layout.roles[role]
            if doubling is None or doubling in there.doublings:
                return {"role": role, "doubling": doubling, "from": there.n, "to": there.next}
            plan = await tool.forecast()
            return plan_json(role, there, doubling, [*problems, *plan.problems], plan)
        finally:
            await tool.close()


def plan_json(role: str, there: RoleLayout, doubling: str, problems: list[str], plan: Plan) -> dict[str, object]:
    """A plan as JSON values."""
    return {
        "role": role, "doubling": doubling, "from": there.n, "to": 2 * there.n, "replicas": max(there.replicas, 1),
        "problems": problems, **plan.json(),
    }  # fmt: skip


class _Run:
    """One run of the command."""

    def __init__(self, role: str, to: int, target: str, *, as_json: bool, force: bool) -> None:
        self._role = role
        self._to = to
        self._target = str(parse_address(target))
        self._as_json, self._force = as_json, force
        self._there = RoleLayout()
        self._began = time.monotonic()

    async def run(self, *, dry_run: bool, abort: bool, yes: bool, timeout_s: float) -> bool:
        """Carry out the command. Returns True if everything that was asked for is done."""
        address = parse_address(self._target)
        zookeeper = ZooKeeper(address, session_timeout_s=SESSION_TIMEOUT_S)
        await zookeeper.connect()
        tool = DoublingTool(
            zookeeper,
            address.root,
            self._role,
            operator=operator(),
            progress=self._progress,
            force=self._force,
            acted=_hook(os.environ.get(STOP_VARIABLE, "")),
        )
        try:
            layout, doubling, problems = await tool.look(self._to)
            if doubling is None:
                self._say({"event": "done", "role": self._role, "partitions": self._to}, f"{self._role} has {self._to} partitions")
                return True
            self._there = there = layout.roles[self._role]
            if abort:
                return await self._take_back(tool, layout, doubling)
            fresh = doubling not in there.doublings
            plan = await tool.forecast() if fresh else None
            if plan is not None:
                problems = [*problems, *plan.problems]
            self._plan(there, doubling, problems, plan)
            if problems and not dry_run:
                raise InvalidArgument(f"{self._role} cannot be doubled now: {'; '.join(problems)}")
            if dry_run:
                return not problems
            if fresh and not yes:
                await asyncio.to_thread(typer.confirm, f"Double {self._role}?", abort=True)
            return self._ended(await tool.run(doubling, timeout_s))
        finally:
            await tool.close()
            await zookeeper.close()

    async def _take_back(self, tool: DoublingTool, layout: Layout, doubling: str) -> bool:
        there = layout.roles[self._role]
        if there.next == there.n:
            raise InvalidArgument(f"no doubling of {self._role} is under way: there is nothing to take back")
        await tool.take_back(doubling)
        self._say(
            {"event": "taken_back", "role": self._role, "doubling": doubling, "partitions": there.n},
            f"doubling {doubling} of {self._role} is taken back; it has {there.n} partitions. Stop the replicas of partitions "
            f"{there.n} to {there.next - 1}; `pixiu up` does that itself",
        )
        return True

    def _plan(self, there: RoleLayout, doubling: str, problems: list[str], plan: Plan | None) -> None:
        count, wanted = there.n, max(there.replicas, 1)
        names = " → ".join(phase.value for phase in phases(self._role))
        if plan is None:
            self._say(
                {"event": "resumed", "role": self._role, "doubling": doubling, "n": there.n, "next": there.next},
                f"doubling {doubling} of {self._role} goes on ({names})",
            )
            return
        said = [f"{self._role}: {count} → {2 * count} partitions, {wanted} replica(s) each ({names})"]
        said += _plan_lines(plan)
        said += [f"✗ {problem}" for problem in problems]
        self._say({"event": "plan", **plan_json(self._role, there, doubling, problems, plan)}, "\n".join(said))

    def _progress(self, step: Step) -> None:
        seconds = round(time.monotonic() - self._began, 3)
        if self._as_json:
            print_json({"event": "phase", "seconds": seconds, **step.json()})
            return
        phase, missing = step.phase, step.missing
        out = error_console()
        out.print(f"{seconds:8.1f} s  {phase.value:<8}{step.text()}".rstrip(), highlight=False)
        for text in missing:
            out.print(f"            waits for {text}", highlight=False, markup=False)
        if phase is Phase.START and missing:
            out.print("            `pixiu up` starts them on its machine; elsewhere:", highlight=False, markup=False)
            for line in self._commands(missing):
                out.print(f"              {line}", highlight=False, markup=False)

    def _commands(self, missing: tuple[str, ...]) -> list[str]:
        wanted = max(self._there.replicas, 1)
        found = [(int(text.split()[2].rstrip(":")), wanted - int(text.split()[3])) for text in missing]
        return start_commands(self._role, found, self._target)

    def _ended(self, result: Result) -> bool:
        fields = {
            "role": result.role, "doubling": result.doubling, "partitions": result.partitions,
            "seconds": {phase: round(seconds, 3) for phase, seconds in result.seconds.items()}, "missing": list(result.missing),
        }  # fmt: skip
        if result.missing:
            again = f"not done: {'; '.join(result.missing)}. `pixiu double {self._role}` goes on, `--abort` takes it back"
            self._say({"event": "waiting", **fields}, again)
            return False
        self._say({"event": "done", **fields}, f"✓ {result.role} has {result.partitions} partitions")
        return True

    def _say(self, fields: dict[str, object], text: str) -> None:
        print_result(fields, text, as_json=self._as_json)


def _plan_lines(plan: Plan) -> list[str]:
    """Format a plan for people."""
    what = KEYS[plan.role].removesuffix("s")
    said = []
    for one in plan.forecasts:
        hottest = f"; hottest {what}: {one.hottest} with {one.hottest_per_s:,.0f}/s" if one.hottest_per_s else ""
        said.append(
            f"  partition {one.partition}: {one.per_s:,.0f}/s now; then {one.stays_per_s:,.0f}/s, and {one.goes_per_s:,.0f}/s in "
            f"partition {one.child}{hottest}"
        )
    for machine in plan.machines:
        room = [
            f"{mib(free)} of {name} left, {mib(wanted)} wanted"
            for name, free, wanted in (
                ("memory", machine.memory_free_bytes, machine.memory_wanted_bytes),
                ("disk", machine.disk_free_bytes, machine.disk_wanted_bytes),
            )
            if free is not None
        ]
        if room and machine.replicas:
            said.append(
                f"  {machine.host}: {'; '.join(room)} by {machine.replicas} new replica(s), if they run where their parents do"
            )
    if plan.move_bytes:
        said.append(f"  to be copied: about {mib(plan.move_bytes // 2)}, of {mib(plan.move_bytes)} that are stored")
    if plan.pause_s:
        said.append(f"  pause to expect: about {plan.pause_s * 1000:,.0f} ms for each {what} that moves, none for the others")
    else:
        said.append("  pause to expect: none")
    said += [f"! {name} does not answer: its load is unknown" for name in plan.unknown]
    return said + [f"! {warning}" for warning in plan.warnings]


def _hook(named: str) -> Callable[[Phase], None]:
    known, last = [each.value for each in Phase], set(filter(None, named.split(",")))
    if not last.issubset(known):
        raise ConfigurationError(f"{STOP_VARIABLE}={named}: must be of {', '.join(known)}")

    def acted(done: Phase) -> None:
        if done.value in last:
            os.kill(os.getpid(), signal.SIGKILL)

    return acted
