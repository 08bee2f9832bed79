"""Runs one role or several in a process, from their options to the exit code.

    options ─ log ─ every role starts ─ all run ─ (SIGTERM, SIGINT, `pixiu drain` of one, a crash) ─ they drain in order ─ exit
                                               └ a second signal: exit at once

A process has one event loop, with its signal handlers, garbage collector's settings, watchdog and turn; everything else belongs to
a role's run. Roles start concurrently, because each waits for others through the registry. The process is the unit of failure: if
a role crashes or cannot start, the others drain, and the process ends with that role's exit code.

Exit codes: 0 in order, 1 a crash (a traceback in the log only when it is a bug), 2 wrong options or a missing environment (a taken
port, no ZooKeeper), 128 + the signal's number at a second signal.

Source: docs/architecture.md, "Nodes", docs/promises.md, "Failure rules" 6.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from cluster.core import log
from cluster.core.pacing import new_loop, pacer_of
from cluster.core.turn import Turn
from cluster.links.local import LocalSwitch
from cluster.process.collector import Collector
from cluster.process.context import Context, MembershipFactory, Service
from cluster.process.registry_session import SharedSession
from cluster.process.role_run import RoleRun
from cluster.process.watchdog import Watchdog
from cluster.rpc.local_streams import LocalStreams
from cluster.settings import command
from cluster.settings.options import (
    ClusterOptions,
    PacedOptions,
    RoleOptions,
    example_toml,
    is_loopback,
    load_options,
    partition_of,
)
from pixiu.discovery.paths import DRAIN_ORDER
from pixiu.errors import ConfigurationError, PixiuError, RegistryUnavailable
from pixiu.version import __version__

EXIT_OK: Final = 0
EXIT_CRASH: Final = 1
EXIT_ENVIRONMENT: Final = 2
PRIVATE_UMASK: Final = 0o077
"""Only the owner may read the files of a process with a data folder."""

OptionsT = TypeVar("OptionsT", bound=RoleOptions)


@dataclass(frozen=True, eq=False)
class Role(Generic[OptionsT]):
    """A role to run.

    Args:
        service: makes its service.
    """

    name: str
    cluster: ClusterOptions
    options: OptionsT
    service: Callable[[Context[OptionsT]], Service]
    identity: log.Identity = field(init=False)
    context: contextvars.Context = field(init=False, default_factory=contextvars.copy_context)
    """The context of everything that the role does, with its log identity."""

    def __post_init__(self) -> None:
        identity = log.Identity(self.options.log_level, role=self.name, partition=partition_of(self.options))
        object.__setattr__(self, "identity", identity)
        self.context.run(log.act_as, identity)


class Host:
    """The roles of this process, in the running event loop. Its own lines are those of its only role, or of a `node`."""

    def __init__(self, roles: Sequence[Role[Any]], membership: MembershipFactory) -> None:
        self._loop = asyncio.get_running_loop()
        log.act_as(roles[0].identity if len(roles) == 1 else log.Identity(_least_level(roles), role="node"))
        self._log = log.get_logger()
        self._roles, self._membership = roles, membership
        self.turn = Turn(time.monotonic, self._loop.call_soon)
        self.switch, self.local_streams = LocalSwitch(), LocalStreams()
        self.started_ms = time.time_ns() // 1_000_000
        self._collector = Collector()
        self._pacer = pacer_of(self._loop)
        self._ending = asyncio.Event()
        self._watched = False
        self._exit_code = EXIT_OK
        self._sessions = _sessions(roles)
        self._runs: dict[Role[Any], RoleRun[Any]] = {}
        limit_s = min(role.options.session_timeout_ms for role in roles) / 2000
        self._watchdog = Watchdog(limit_s, self._stalled, self._turns_again, self._note_lag)

    async def run(self) -> int:
        """Run all roles until a signal, a drain or a crash. Returns the exit code: that of the first role that failed."""
        self._loop.set_exception_handler(self._loop_error)
        self._collector.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled, number)
        lives = {role: self._loop.create_task(self._live(role), context=role.context) for role in self._roles}
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({ending, *lives.values()}, return_when=asyncio.FIRST_COMPLETED)
        self._ending.set()
        for leaving in self._in_order():
            for role in leaving:
                if role in self._runs:
                    self._runs[role].leave()
            await asyncio.gather(*(lives[role] for role in leaving))
        await ending
        self._watchdog.stop()
        self._collector.stop()
        return self._exit_code

    def _in_order(self) -> Iterable[list[Role[Any]]]:
        """Yield the roles that leave together: first those that do not serve, because they crashed or never started."""
        yield [role for role in self._roles if role not in self._runs or not self._runs[role].running]
        for name in (*DRAIN_ORDER, *({role.name for role in self._roles} - {*DRAIN_ORDER})):
            yield [role for role in self._roles if role.name == name]

    async def _live(self, role: Role[Any]) -> None:
        """Run a role, in its context, and log how it ended."""
        logger = log.get_logger()
        try:
            run = RoleRun(role.name, role.cluster, role.options, role.identity, self._sessions[role], self)
            self._runs[role] = run
            await run.run(role.service, self._membership)
        except (ConfigurationError, RegistryUnavailable) as error:
            self._failed(EXIT_ENVIRONMENT)
            logger.error(log.START_FAILED, error=str(error))
        except PixiuError as error:
            self._failed(EXIT_CRASH)
            logger.error(log.CRASHED, error=str(error), code=error.code)
        except Exception as error:
            self._failed(EXIT_CRASH)
            logger.error(log.CRASHED, error=repr(error), exc_info=True)
        else:
            logger.info(log.STOPPED)

    def _failed(self, exit_code: int) -> None:
        self._exit_code = self._exit_code or exit_code

    # Called by the runs of the roles (`cluster.process.role_run.Owner`).

    @property
    def ending(self) -> bool:
        """True once the process ends."""
        return self._ending.is_set()

    def end(self) -> None:
        """End the process: every role of it."""
        self._ending.set()

    def registered(self) -> None:
        """Watch the loop from now on: a role has a place in the registry."""
        if not self._watched:
            self._watched = True
            self._watchdog.start()

    def samples(self) -> dict[str, object]:
        """Return metrics of the process, which each of its roles shows."""
        return {
            **self._collector.samples(),
            "watchdog_stalls_total": self._watchdog.stalls,
            **({"loop_rests_total": self._pacer.rests} if self._pacer is not None else {}),
        }

    # Called by the event loop and the watchdog.

    def _signalled(self, number: signal.Signals) -> None:
        if self._ending.is_set():
            self._log.warning(log.STOPPED_AT_ONCE, signal=number.name)
            os._exit(128 + number)
        self._ending.set()

    def _loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Let the role whose callback or task has failed log and count it; the first one where that is unknown."""
        # From Python 3.12 on asyncio calls this in the context of what has failed, which cannot be entered twice.
        where = getattr(context.get("handle"), "_context", None) or contextvars.copy_context()
        identity = where.copy().run(log.current_identity)
        for role in sorted(self._runs, key=lambda role: role.identity is not identity)[:1]:
            role.context.copy().run(self._runs[role].loop_error, context)

    def _note_lag(self, seconds: float) -> None:
        for run in self._runs.values():
            run.note_loop_lag(seconds)

    def _stalled(self, seconds: float, stack: str) -> None:
        """Give up every role's place in the registry, which kazoo's threads would hold for ever. Runs in the watchdog's thread."""
        self._log.error(log.LOOP_STALLED, seconds=round(seconds, 3), stack=stack)
        ends = [threading.Thread(target=session.end, daemon=True) for session in {*self._sessions.values()}]
        for end in ends:
            end.start()
        for end in ends:
            end.join()

    def _turns_again(self) -> None:
        self._log.warning(log.LOOP_BACK, stalls=self._watchdog.stalls)


def _sessions(roles: Sequence[Role[Any]]) -> dict[Role[Any], SharedSession]:
    """Make the sessions with the registry: one for those roles for which it would be the same."""
    alike: dict[tuple[object, ...], list[Role[Any]]] = {}
    for role in roles:
        options = role.options
        same = (options.registry, options.session_timeout_ms, options.connect_timeout_s, role.cluster)
        alike.setdefault(same, []).append(role)
    found: dict[Role[Any], SharedSession] = {}
    for group in alike.values():
        names, first = list(dict.fromkeys(role.name for role in group)), group[0]
        session = SharedSession(names, first.cluster, first.options, first.cluster.tls(first.name))
        found |= dict.fromkeys(group, session)
    return found


def run_roles(roles: Sequence[Role[Any]], config: str | None, membership: MembershipFactory) -> int:
    """Run roles with checked options in this process until it is asked to end. Returns the exit code.

    config: the file of their options, for the log. membership: `registry.membership.Membership`.
    """
    log.configure(roles[0].options.log_format, _least_level(roles))
    for role in roles:
        role.context.run(_announce, role, config)
    if any(role.options.data_dir for role in roles):
        os.umask(PRIVATE_UMASK)
    pace_s = min((role.options.pace_ms / 1000 for role in roles if isinstance(role.options, PacedOptions)), default=0.0)

    async def main() -> int:
        return await Host(roles, membership).run()

    with asyncio.Runner(loop_factory=lambda: new_loop(pace_s)) as runner:
        return runner.run(main())


def run_role(
    name: str,
    options_type: type[OptionsT],
    service_factory: Callable[[Context[OptionsT]], Service],
    argv: Sequence[str],
    *,
    membership: MembershipFactory,
) -> int:
    """Run a role as a process of its own. Arguments and result as of `run_roles`.

    argv: the arguments without the program's name.

    Source: docs/operations.md.
    """
    try:
        wanted = command.parse(name, options_type, argv)
        if wanted.show_example:
            print(example_toml(name, options_type))
            return EXIT_OK
        cluster, options = load_options(name, options_type, wanted.config, os.environ, wanted.overrides, names_registry=True)
    except ConfigurationError as error:
        print(f"{name}: wrong options:\n{error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    return run_roles([Role(name, cluster, options, service_factory)], wanted.config, membership)


def _least_level(roles: Sequence[Role[Any]]) -> str:
    """Return the log level of the role that logs most."""
    levels: list[str] = [role.options.log_level for role in roles]
    return min(levels, key=log.level_of)


def _announce(role: Role[Any], config: str | None) -> None:
    """Log the start of a role, and what an operator should know of its options."""
    options, cluster, logger = role.options, role.cluster, log.get_logger()
    logger.info(log.STARTING, version=__version__, pid=os.getpid(), registry=options.registry, config=config)
    for path in (*cluster.files_with_keys(role.name), *options.files_with_keys()):
        if is_open_to_all(path):
            logger.warning(log.FILE_OPEN_TO_ALL, path=str(path))
    if options.data_dir and not is_private(Path(options.data_dir)):
        logger.warning(log.FILE_OPEN_TO_ALL, path=options.data_dir)
    for listener in options.insecure_listeners():
        logger.warning(log.LISTENER_OPEN_TO_ALL, listener=listener)
    for text in options.doubtful_settings():
        logger.warning(log.SETTING_DOUBTFUL, text=text)
    if options.cluster_insecure and not cluster.tls_dir and not is_loopback(options.host):
        logger.warning(
            log.LISTENER_OPEN_TO_ALL,
            listener=f"cluster_insecure = true: everybody who reaches {options.host} can act as any process",
        )


def is_open_to_all(path: Path) -> bool:
    """Return True if every user of this machine may read a file. A missing file is reported by its reader."""
    try:
        return bool(os.stat(path).st_mode & stat.S_IROTH)
    except OSError:
        return False


def is_private(folder: Path) -> bool:
    """Return True if a data folder belongs to its owner alone, or does not exist."""
    try:
        return not os.stat(folder).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    except OSError:
        return True
