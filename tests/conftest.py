"""Marks every test by where it lies and which fixtures it uses, so that nobody has to: `make quick` runs what has no such mark.

    tests/e2e, tests/sim, tests/fuzz      e2e, sim, fuzz
    fixtures of tests.support.zookeeper   zookeeper
    fixtures of tests.support.roles       process

`process`, `sim` and `slow` are set by hand elsewhere. A test that starts a process without a mark that says so fails, and is
told which mark it lacks. Locally property tests draw fewer examples, see `tests.support.effort`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

from cluster.core.compiled import BUILD  # isort: skip -- before all that may be compiled
from cluster.access import passwords
from tests.support.builds import skip_what_changes_compiled_modules, stands_in_for_compiled
from tests.support.effort import TURN, runs
from tests.support.shared_zookeeper import end_shared_server

TESTS = Path(__file__).parent
FOLDERS = ("e2e", "sim", "fuzz")
"""Whose name is the mark of every test in them."""
FIXTURES = {"zookeeper_server": "zookeeper", "own_server": "zookeeper", "roles": "process"}
STARTS = ("e2e", "sim", "process", "zookeeper")
"""Marks of tests that may start processes."""
LONG = ("spark", "e2e", "sim", "process", "zookeeper")
"""Marks of tests whose files take longest, the longest first."""
SHARING = ("tests/pipeline/",)
"""Folders whose tests have one Spark and one cluster."""
STARTING = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty"}
"""The audit events by which Python reports a new process."""

EXAMPLES = runs("PIXIU_PROPERTY_EXAMPLES", local=25, ci=60)
"""Of a property test that says nothing else."""

hypothesis.settings.register_profile(
    "pixiu",
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # also of a machine that is busy with other things
)
hypothesis.settings.load_profile("pixiu")

os.environ.setdefault("SSL_CERT_FILE", os.devnull)
"""Processes of tests verify no certificates; to read the machine's is a sixth of what the start of a role takes (aiohttp does)."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the suite in the background ignores Ctrl-C for it, and processes of tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

skip_what_changes_compiled_modules()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Leave out a test whose classes cannot take the place of compiled ones."""
    try:
        return (yield)
    except TypeError as error:
        if stands_in_for_compiled(error):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Every worker collects everything: to look for garbage in what all stays is a third of what that costs."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def quick_passwords() -> Iterator[None]:
    """Hashing a password takes 50 ms on purpose, which no test needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passwords, "N", 16)
        patch.setattr(passwords, "UNKNOWN", replace(passwords.UNKNOWN, n=16))
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_syncs(request: pytest.FixtureRequest) -> Iterator[None]:
    """A sync of this process waits for no disk: no test cuts the power of the machine. Those that play it, or count syncs, put
    their own in place; simulations interrupt the real ones."""

    def sync(fd: int) -> None:
        os.fstat(fd)  # an error where the file is closed

    with pytest.MonkeyPatch.context() as patch:
        if folder_of(request.path) not in FOLDERS:
            patch.setattr(os, "fsync", sync)
            patch.setattr(os, "fdatasync", sync)
        yield


def pytest_report_header() -> str:
    """Which build is tested."""
    return f"build: {BUILD}"


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> None:
    """Name a failed test at once: the summary comes at the end of a long run."""
    if report.failed:
        terminal: pytest.TerminalReporter = config.pluginmanager.getplugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(f"{report.nodeid} failed")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Another day or hour another portion is played."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"PIXIU_TURN={TURN} plays the same portion again")


_running: list[pytest.Item] = []
"""The test that runs now, unless its marks allow it to start processes."""


@cache
def folder_of(path: Path) -> str:
    """The folder of `tests` in which a file is; cached, because a file has many tests."""
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the marks, before `-m` selects by them."""
    for item in items:
        marks = {folder_of(item.path)} & set(FOLDERS)
        marks |= {mark for fixture, mark in FIXTURES.items() if fixture in getattr(item, "fixturenames", ())}
        for mark in sorted(marks):
            item.add_marker(mark)
    # What takes long comes first, so that no worker is left with it, and of that what all waits for one Spark. Then what looks at
    # all sources, so that one worker parses them.
    items.sort(
        key=lambda item: (
            next((number for number, mark in enumerate(LONG) if item.get_closest_marker(mark)), len(LONG)),
            item.path.parent != TESTS,
        )
    )


def pytest_sessionfinish() -> None:
    """Also of each worker."""
    end_shared_server()


def group_of(nodeid: str) -> str:
    """What is in one worker: a file, or the files of a folder of `SHARING`."""
    return next((folder for folder in SHARING if nodeid.startswith(folder)), nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Scheduling by file that knows the folders which share what is dear to start."""
    if config.getvalue("dist") != "loadfile":
        return None
    scheduling = LoadFileScheduling(config, log)
    scheduling._split_scope = group_of
    return scheduling


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Remember a test that must not start anything."""
    if not any(item.get_closest_marker(mark) for mark in STARTS):
        _running.append(item)
    try:
        return (yield)
    finally:
        _running.clear()


def _forbid(event: str, _: tuple[object, ...]) -> None:
    if _running and event in STARTING:
        raise RuntimeError(
            f"{_running[0].nodeid} starts a process: give it @pytest.mark.process, so that `make quick` leaves it out"
        )


sys.addaudithook(_forbid)
