"""Programs that run beside the leading admin: the console, and the probes whose shares it exports.

    elected ──▶ start `pixiu console`, `pixiu probe --watch` ──▶ ended? again, after a pause
    deposed ──▶ close their standard input ──▶ they end

Each is a process of its own: it works as an operator's command does, and what it costs, or breaks, is not the admin's.

Source: docs/console.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from structlog.typing import FilteringBoundLogger

from admin.options import Options
from cluster.metrics.metrics import Sample
from cluster.settings.options import ClusterOptions
from pixiu.discovery.login import CREDENTIALS_FILE
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.tls import TLS_DIR

FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0
END_S: Final = 5.0
"""Time in which a program ends after its standard input was closed, seconds; then it is killed."""
READ_S: Final = 10.0
MAX_REPORT_BYTES: Final = 8 << 20
MAX_PATHS: Final = 500
ENDED: Final = "beside_ended"
TARGET: Final = "PIXIU_TARGET"


class Beside:
    """The programs beside an admin while it leads."""

    def __init__(self, options: Options, cluster: ClusterOptions, log: FilteringBoundLogger) -> None:
        self._options, self._log = options, log
        self._environment = _environment(options, cluster)
        self._tasks: list[asyncio.Task[None]] = []
        self.report: dict[str, Any] = {}
        """The availability as it was read last; empty: there is none."""

    async def begin(self) -> None:
        """Start the programs that the options name."""
        await self.end()
        for command in commands(self._options):
            self._tasks.append(asyncio.create_task(self._keep(command), name=f"beside-{command[0]}"))
        if self._options.probe_interval_ms:
            self._tasks.append(asyncio.create_task(self._read_reports(), name="beside-report"))

    async def end(self) -> None:
        """End them."""
        tasks, self._tasks, self.report = self._tasks, [], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def availability(self, _query: Mapping[str, str]) -> dict[str, object]:
        """The JSON of /availability."""
        return self.report

    def samples(self) -> Iterator[Sample]:
        """Samples for metrics: of 30 days, so the counts are gauges; of hops, the buckets of histograms."""
        if not (report := self.report):
            return
        total = report["total"]
        yield Sample("probes_arrived", total["arrived"])
        yield Sample("probes_failed", total["failed"])
        if total["share"] is not None:
            yield Sample("availability", total["share"])
        for path in report["paths"][:MAX_PATHS]:
            if path["share"] is not None:
                yield Sample("path_availability", path["share"], {"path": path["path"]})
        for hop in report["hops"]:
            yield Sample("hop_seconds_count", hop["count"], {"hop": hop["hop"]})
            yield Sample("hop_seconds_sum", hop["sum_s"], {"hop": hop["hop"]})
            for bound, count in hop["buckets"].items():
                yield Sample("hop_seconds_bucket", count, {"hop": hop["hop"], "le": bound})

    async def _keep(self, command: Sequence[str]) -> None:
        """Run a program, and start it again when it has ended."""
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, random.random)
        while True:
            try:
                code = str(await self._run(command))
            except OSError as error:  # no memory, too many processes
                code = str(error)
            self._log.warning(ENDED, program=command[0], code=code)
            await asyncio.sleep(backoff.next_s())

    async def _run(self, command: Sequence[str]) -> int:
        """Run a program until it ends, or this is cancelled. Returns its exit code."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, env=self._environment
        )
        try:
            return await process.wait()
        except asyncio.CancelledError:
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            raise

    async def _read_reports(self) -> None:
        while True:
            self.report = await asyncio.to_thread(_report, Path(self._options.probe_file))
            await asyncio.sleep(READ_S)


def commands(options: Options) -> list[list[str]]:
    """Arguments of Python for each program that runs beside a leader."""
    found = list[list[str]]()
    if options.console_port:
        access = ["--access", options.console_access_file] if options.console_access_file else ["--look"]
        found.append(["ops.console", "--until-eof", "--port", str(options.console_port), *access])
    if options.probe_interval_ms:
        interval = f"{options.probe_interval_ms / 1000:g}"
        probe = ["tools.cli.main", "probe", "--watch", "--until-eof", "--json", "--interval", interval]
        found.append([*probe, "--keep", options.probe_file])
    return found


def _environment(options: Options, cluster: ClusterOptions) -> dict[str, str]:
    """Environment of the programs: the admin's, with what its options say and the environment does not."""
    found = {TARGET: options.registry}
    if cluster.registry_credentials_file:
        found[CREDENTIALS_FILE] = cluster.registry_credentials_file
    if cluster.tls_dir:
        found[TLS_DIR] = cluster.tls_dir
    return {**found, **os.environ, TARGET: options.registry}


def _report(path: Path) -> dict[str, Any]:
    """The report in the file of probes; empty if there is none that can be read."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(MAX_REPORT_BYTES))["report"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
