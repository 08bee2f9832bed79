"""Plays a newcomer: README from top to bottom in a copy of the repository, every command and snippet as printed.

    python scripts/newcomer.py                 # what is installed here stands for what a newcomer downloads
    python scripts/newcomer.py --download      # nothing stands for anything: the package index, nothing pinned but by README
    python scripts/newcomer.py --brief         # without what other tests of the suite play, as the suite calls it

Each command runs in a terminal of its own, as one types while `make run` goes on in the first one; what README says of it must
come, and Ctrl-C ends what does not end by itself. README uses the usual ports of MQTT and ZooKeeper: the commands run in a network
of their own where the system allows one (`unshare`), else these ports must be free. What needs the package index is done beside it.

Every fenced block and every command in the text is in `PLAYED` or, with the reason why not, in `NAMED`; anything else is an error.
Exit code 0: all went as README says. 1: something did not. 77: it cannot be played here, and the last line says why.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gzip
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE: Final = re.compile(r"`((?:[A-Z_]+=\S+ )?(?:\.venv/bin/)?(?:go|make|mosquitto_pub|mosquitto_sub|pip|pixiu|python3?) [^`]+)`")
DRAWING: Final = ""
SNIPPET: Final = "python"
SHELL: Final = "sh"
PORTS: Final = (2181, 1883, 1884)
"""Default ports of README's commands."""
PATIENT_S: Final = 240.0
"""Time-out for expected output; machines are loaded."""
AGAIN_S: Final = 2.0
"""Time after which a message that nobody showed is sent again: a stock client does not report when it listens."""
INSTALLED: Final = "installed"
"""A file in the environment that marks it as ready."""
CANNOT: Final = 77
SIOCGIFFLAGS: Final = 0x8913
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 0x1


class Step(NamedTuple):
    """A command, or a block in another language than the shell's, as printed; `line` counts from 1."""

    line: int
    language: str
    text: str


class Play(NamedTuple):
    """Directions for playing a command, with its expected output. All texts are regular expressions, each searched in the whole
    output.

    Attributes:
        shows: expected when it has ended, with code 0; for one that stays, before the next command is typed.
        later: for one that stays, expected before the newcomer ends it.
        stays: runs until Ctrl-C.
        meanwhile: the next command does not wait for its end.
        seen: the command that must show this one's message, and the text; this one is repeated until then.
        again: is typed again until it ends with code 0.
        outside: needs the package index, so that it runs outside of the network of its own.
        last: runs after Ctrl-C has ended everything else.
        alone: everything before it is ended by Ctrl-C.
        saved: is the content of a file, whose name its first line has behind `#`; nothing runs.
        elsewhere: the test that plays it, so that `--brief` leaves it out.
    """

    shows: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    stays: bool = False
    meanwhile: bool = False
    seen: tuple[str, str] | None = None
    again: bool = False
    outside: bool = False
    last: bool = False
    alone: bool = False
    saved: bool = False
    elsewhere: str = ""


PX: Final = ".venv/bin/pixiu"
MQTT_LISTENER: Final = "mosquitto_sub -p 1883 -t room/42 &"
REPORT: Final = tuple(f"(?m)^{word} " for word in ("sent", "delivered", "lost", "repeated", "out of order"))
ROLES: Final = ("admin", "broker", "gateway", "pi", "proxy", "relay", "router", "topic", "xiu")
PLAYED: Final[dict[str, Play]] = {
    "make run": Play(
        stays=True, shows=("starting .* processes", "are Running"), later=("(?m)^Replay", *REPORT, "every promise was kept")
    ),
    "# hello.py": Play(shows=("b'hello'",)),
    f"{PX} status": Play(shows=(*(f"(?m)^{role} " for role in ROLES), "✓ healthy")),
    f"{PX} listen --room 42": Play(
        stays=True, shows=("Ctrl-C ends",), later=("room 42 .*: hello\n", "room 42 .*: go\n", "room 42 .*: hello from MQTT\n")
    ),
    f'{PX} send --room 42 "hello"': Play(shows=("accepted",)),
    f'{PX} send --room 42 --signal --receipt "go"': Play(shows=("delivered",)),
    MQTT_LISTENER: Play(stays=True, later=("hello from MQTT",)),
    'mosquitto_pub -p 1884 -t room/42 -m "hello from MQTT" -q 1': Play(seen=(MQTT_LISTENER, "hello from MQTT")),
    f"{PX} listen --user 7 &": Play(stays=True, shows=("Ctrl-C ends",), later=("hello, seven\n",)),
    f'{PX} send --user 7 "hello, seven"': Play(shows=("accepted|delivered",)),
    f"{PX} presence 7 8": Play(shows=("(?m)^7: .*1 device", "(?m)^8: offline")),
    f'{PX} send --mail --user 7 "kept for you"': Play(shows=("replicated",)),
    f"{PX} inbox list 7": Play(shows=("kept for you",)),
    f"{PX} topic create orders --parts 2": Play(shows=("orders: 2 parts",)),
    f"{PX} topic write orders --count 1000": Play(shows=("stored: 1,?000 messages",)),
    f"{PX} topic read orders": Play(shows=(r"(?m)^[12]:0\t",)),
    f"{PX} topic split orders 1": Play(shows=("orders: ",)),
    f"{PX} topic show orders": Play(shows=("(?m)^part ", "sealed")),
    f"{PX} probe": Play(shows=("total .*ms", "all .*paths work")),
    f"{PX} double broker --dry-run": Play(shows=("broker: .* partitions",)),
    f"{PX} pipeline audit": Play(
        meanwhile=True, shows=("Audit of mail", "entries"), elsewhere="tests/pipeline/test_jobs.py::TestOnACluster::test_commands"
    ),
    f"{PX} replay FILE.jsonl.gz --speed 1000": Play(shows=(*REPORT, "every promise was kept")),
    f"{PX} up": Play(last=True, stays=True, shows=("are Running",), elsewhere="tests/onebox/test_up_e2e.py"),
    "pip install ./pixiu": Play(outside=True, shows=("Successfully installed .*pixiu-sdk",), elsewhere="tests/e2e/test_wheels.py"),
    "import asyncio": Play(shows=(r"b'(hello|and more|go)'", "b'kept for you'", r"(?m)^b'.*' b'.*'$")),
    # To its last mail: Ctrl-C while mails come may hang the stock client, whose signal handler takes a lock that it may hold.
    "mosquitto_sub -c -i phone:mine -u 7 -q 1 -t user/7": Play(stays=True, later=("kept for you", "(?m)^999$")),
}
"""Directions by command, or by the first line of a snippet."""

NAMED: Final[dict[str, str]] = {
    "make test": "this is one of its tests",
    "PIXIU_RUN_S=60 make run": "make run once more, a minute long; tests/onebox/test_up_e2e.py ends `pixiu up` by --for",
    "make quick": "is part of make test",
    "make check": "is part of make test",
    "make sim": "minutes of two cores; make test plays fewer seeds",
    "make mail": "ten minutes; make test plays it with fewer kills",
    f"{PX} up --secure": "tests/e2e/test_secure.py starts one and logs in with its token",
    "export PIXIU_CLUSTER_TLS_DIR=run/tls": "the same",
    "export PIXIU_TARGET=zks://127.0.0.1:2181/pubsub": "the same",
    "export PIXIU_CA=run/listeners/ca.pem": "the same",
    "export PIXIU_TOKEN=$(cat run/secure/token)": "the same",
    'mosquitto_sub --cafile "$PIXIU_CA" -h 127.0.0.1 -p 1883 -u demo -P "$PIXIU_TOKEN" -t room/42': (
        "tests/e2e/test_client_tls.py has stock clients come by TLS"
    ),
    "make bench": "measures; needs a quiet machine and the peers",
    "pixiu bench --peers": "the same",
}
"""Items that are not played, with the reason."""


class Directions(NamedTuple):
    """How to read a page: what is played, and what is not for a reason. `page`: its file's name."""

    page: str
    played: dict[str, Play]
    named: dict[str, str]


README: Final = Directions("README.md", PLAYED, NAMED)


class Astray(Exception):
    """Something did not go as README describes."""


def steps(text: str) -> list[Step]:
    """Return every command and snippet of a page, in reading order; without comments, each once."""
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        found += steps_of_block(line, match[1], match[2])
    prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in INLINE.finditer(prose):
        found.append(Step(prose.count("\n", 0, match.start()) + 1, SHELL, " ".join(match[1].split())))
    return each_once(found)


def steps_of_block(line: int, language: str, text: str) -> list[Step]:
    """Return the commands of a block of the shell's without comments, or the block."""
    if language != SHELL:
        return [Step(line, language, text)]
    commands = enumerate(re.sub(r"(^|\s+)#.*$", "", command).strip() for command in text.replace("\\\n", "  ").splitlines())
    return [Step(line + number, SHELL, command) for number, command in commands if command]


def each_once(found: list[Step]) -> list[Step]:
    """Return the first of equal steps, in reading order."""
    once = {(step.language, step.text): step for step in sorted(found, key=lambda step: step.line, reverse=True)}
    return sorted(once.values(), key=lambda step: step.line)


def name_of(step: Step) -> str:
    """Return the key of a step in the tables."""
    return step.text.split("\n", 1)[0]


def unplayed(found: list[Step], to: Directions = README) -> list[str]:
    """List the steps that are neither played nor named, and entries of the tables that the page no longer has."""
    known = to.played.keys() | to.named.keys()
    runs = (SHELL, SNIPPET)
    names = {name_of(step) for step in found if step.language != DRAWING}
    lines = [
        f"{to.page}:{step.line}: {name_of(step)}: neither played nor named"
        for step in found
        if step.language != DRAWING
        and (name_of(step) not in known or not (step.language in runs or to.played.get(name_of(step), Play()).saved))
    ]
    return lines + [f"{name}: is not in {to.page} any more" for name in sorted(known - names)]


def log(text: str) -> None:
    """Print a line of progress."""
    print(text, flush=True)


class Terminal:
    """A command in a shell and a process group of its own, as in a terminal."""

    def __init__(self, name: str, command: str, folder: Path, environment: dict[str, str], output: Path) -> None:
        self.name = name
        self._output = output
        # The parent may ignore Ctrl-C, as a job in the background of a shell does, and children would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with output.open("wb") as file:
            # `&` only keeps the newcomer's one terminal free, and a shell's background ignores Ctrl-C.
            self._process = subprocess.Popen(
                ["bash", "-c", command.removesuffix("&").strip()],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        """Return its output so far."""
        return self._output.read_text(errors="replace")

    def shows(self, pattern: str, timeout_s: float = PATIENT_S) -> bool:
        """Return True if a text appears in time."""
        end = time.monotonic() + timeout_s
        while True:
            ended = self._process.poll() is not None
            if re.search(pattern, self.output()):
                return True
            if ended or time.monotonic() > end:
                return False
            time.sleep(0.05)

    def must_show(self, patterns: tuple[str, ...]) -> None:
        """Raise Astray if one of the texts does not appear."""
        for pattern in patterns:
            if not self.shows(pattern):
                raise self.astray(f"{pattern!r} did not come")

    def code(self) -> int:
        """Wait for the end. Returns the exit code; -1 if it does not end in time."""
        try:
            return self._process.wait(PATIENT_S)
        except subprocess.TimeoutExpired:
            return -1

    def must_end(self, timeout_s: float = PATIENT_S) -> None:
        """Wait for the end. Raises Astray unless it comes in time, with exit code 0."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.astray(f"did not end in {timeout_s:.0f} s") from None
        if code:
            raise self.astray(f"ended with exit code {code}")

    def interrupt(self) -> None:
        """Send Ctrl-C to the whole group. Raises Astray if it does not end, or leaves a traceback."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(PATIENT_S)
        except subprocess.TimeoutExpired:
            raise self.astray("does not end by Ctrl-C") from None
        if "Traceback" in self.output():
            raise self.astray("ended with a traceback")

    def kill(self) -> None:
        """Kill the remaining processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def astray(self, what: str) -> Astray:
        """Make the error, with the output."""
        return Astray(f"`{self.name}`: {what}; it showed:\n{self.output()}")


class Newcomer:
    """A person who has cloned the repository and reads a page, its README.

    Args:
        folder: an empty folder for the copy, an environment and outputs.
        to: how to read the page.
        download: download everything instead of using packages installed here.
        brief: snippets run in the environment of `make run`, and nothing else is installed.
    """

    def __init__(self, folder: Path, to: Directions, *, download: bool, brief: bool) -> None:
        self._to = to
        self._copy = folder / "pixiu"
        self._sdk = self._copy / ".venv" if brief else folder / "empty"
        self._outputs = folder / "outputs"
        self._download, self._brief = download, brief
        self._open: list[Terminal] = []
        self._all: list[Terminal] = []
        left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")
        self._environment = {
            name: value for name, value in os.environ.items() if name not in left_out and not name.startswith(("PIXIU_", "PYTEST_"))
        } | {"PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", "XDG_RUNTIME_DIR": str(folder / "runtime")}
        if self._environment.get("SSL_CERT_FILE") == os.devnull:
            del self._environment["SSL_CERT_FILE"]  # the suite's processes verify none; pip does
        if not download:
            self._environment["PIP_CONSTRAINT"] = str(self._copy / "constraints.txt")

    def clone(self) -> None:
        """Copy the files that the repository tracks, uncommitted changes included."""
        self._outputs.mkdir(exist_ok=True)
        # Where programs of this user leave what others of the same address would take for theirs.
        Path(self._environment["XDG_RUNTIME_DIR"]).mkdir(mode=0o700, exist_ok=True)
        listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (self._copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._copy / name)
        talk = [{"ts_ms": 1000 * number, "room": 42, "user": 7 + number % 3, "text": f"line {number}"} for number in range(20)]
        with gzip.open(self._copy / "FILE.jsonl.gz", "wt") as file:  # "your own chat log"
            file.writelines(json.dumps(line) + "\n" for line in talk)

    def make_environment(self) -> None:
        """Do the first step of `make run`."""
        self._must("make .venv/bin/python")
        if not self._download:  # packages installed here replace the downloads; the repository's own are installed
            (site,) = (self._copy / ".venv").glob("lib/python*/site-packages")
            (site / "downloads.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self._must("make .venv/.server")

    def install_sdk(self, found: list[Step]) -> None:
        """Install the SDK in an empty environment; with `brief`, snippets use that of `make run`."""
        if self._brief:
            return
        self._must(f"'{sys.executable}' -m venv '{self._sdk}'")
        for step in found:
            if (play := self._to.played.get(name_of(step))) and play.outside:
                self._must(step.text, play.shows, self._in_the_empty_environment())
        (self._sdk / INSTALLED).touch()

    def read(self, found: list[Step]) -> None:
        """Play all following steps. Raises Astray."""
        try:
            for step in found:
                play = self._to.played.get(name_of(step))
                if play and not play.outside and not play.last:
                    if play.alone:
                        self._end_all()
                    self._play(step, play)
            self._end_all()
            for step in found:
                play = self._to.played.get(name_of(step))
                if play and play.last:
                    self._play(step, play)
            self._end_all()
        finally:
            for terminal in self._all:
                terminal.kill()

    def _play(self, step: Step, play: Play) -> None:
        program, *words = step.text.split()
        if play.saved:
            (self._copy / words[0].removesuffix(":")).write_text(step.text)
            return
        if program == "export":
            name, _, value = words[0].partition("=")
            self._environment[name] = value
            return
        if step.language == SHELL and program.startswith("mosquitto_") and not shutil.which(program):
            log(f"  left out: {program} is not installed: {step.text}")
            return
        began = time.monotonic()
        terminal = self._type(step)
        if play.stays or play.meanwhile:
            self._open.append(terminal)
        if not (play.meanwhile or play.again):
            terminal.must_show(play.shows)
        if not (play.stays or play.meanwhile):
            end = began + PATIENT_S
            while play.again and terminal.code() and time.monotonic() < end:
                terminal = self._type(step)
            terminal.must_end()
            terminal.must_show(play.shows)
        if play.seen:
            listener = next(each for each in self._open if each.name == play.seen[0])
            tries = 0
            while not listener.shows(play.seen[1], AGAIN_S):
                tries += 1
                if tries > PATIENT_S / AGAIN_S:
                    raise listener.astray(f"{play.seen[1]!r} did not come")
                self._type(step).must_end()
        log(f"{time.monotonic() - began:6.1f} s  {self._to.page}:{step.line}: {name_of(step)}")

    def _end_all(self) -> None:
        """Check the output expected until now; then send Ctrl-C, in the cluster's terminal last."""
        for terminal in reversed(self._open):
            began = time.monotonic()
            play = self._to.played[terminal.name]
            if play.meanwhile:
                terminal.must_end(2 * PATIENT_S)
                terminal.must_show(play.shows)
            else:
                terminal.must_show(play.later)
                terminal.interrupt()
            log(f"{time.monotonic() - began:6.1f} s  ended: {terminal.name}")
        self._open.clear()

    def _type(self, step: Step) -> Terminal:
        if step.language != SNIPPET:
            return self._terminal(step.text, step.text, self._environment)
        end = time.monotonic() + 2 * PATIENT_S
        while not self._brief and not (self._sdk / INSTALLED).exists():
            if time.monotonic() > end:
                raise Astray("the SDK was not installed in time")
            time.sleep(0.05)
        (self._copy / "try_it.py").write_text(step.text)
        return self._terminal(name_of(step), "python try_it.py", self._in_the_empty_environment())

    def _must(self, command: str, shows: tuple[str, ...] = (), environment: dict[str, str] | None = None) -> None:
        began = time.monotonic()
        terminal = self._terminal(command, command, environment or self._environment)
        try:
            terminal.must_end(2 * PATIENT_S)
            terminal.must_show(shows)
        finally:
            terminal.kill()
        log(f"{time.monotonic() - began:6.1f} s  {command}")

    def _terminal(self, name: str, command: str, environment: dict[str, str]) -> Terminal:
        terminal = Terminal(name, command, self._copy, environment, self._outputs / f"{os.getpid()}-{len(self._all)}.txt")
        self._all.append(terminal)
        return terminal

    def _in_the_empty_environment(self) -> dict[str, str]:
        return self._environment | {"PATH": f"{self._sdk / 'bin'}:{self._environment['PATH']}"}


def own_network() -> list[str]:
    """Return the prefix of a command that gives it its own network; empty if the system allows none."""
    command = ["unshare", "--map-root-user", "--net", "--mount", "--"]
    if not shutil.which(command[0]) or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        return []
    return command


def raise_loopback() -> None:
    """Bring up the loopback interface, which is down in a new network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0)))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def taken() -> list[int]:
    """Return the usual ports that are in use."""
    found = []
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                found.append(port)
    return found


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="newcomer-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _play_all(folder: Path, found: list[Step], to: Directions, again: Sequence[str], *, download: bool, brief: bool) -> int:
    network = own_network()
    if not network and (ports := taken()):
        log(f"no network of its own is allowed here, and the ports {', '.join(map(str, ports))} are taken")
        return CANNOT
    newcomer = Newcomer(folder, to, download=download, brief=brief)
    newcomer.clone()
    newcomer.make_environment()
    options = ["--own-network"] * bool(network) + ["--download"] * download + ["--brief"] * brief
    reader = subprocess.Popen([*network, sys.executable, *again, "--in", str(folder), *options], cwd=ROOT)
    try:
        newcomer.install_sdk(found)
        return reader.wait()
    finally:
        reader.terminate()  # it ends what it started
        reader.wait()


def parser_of(documentation: str) -> argparse.ArgumentParser:
    """Make the parser of a program that plays a page."""
    parser = argparse.ArgumentParser(description=documentation.split("\n", 1)[0])
    parser.add_argument("--download", action="store_true", help="nothing that is installed here stands for a download")
    parser.add_argument("--brief", action="store_true", help="without what other tests of the suite play")
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--own-network", action="store_true", help=argparse.SUPPRESS)
    return parser


def follow(found: list[Step], to: Directions, arguments: argparse.Namespace, again: Sequence[str]) -> int:
    """Play the steps of a page; `again`: words behind `python` that run the program again. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if problems := unplayed(found, to):
        log("\n".join(problems))
        return 1
    if arguments.brief:
        found = [step for step in found if not ((play := to.played.get(name_of(step))) and play.elsewhere)]
    try:
        if arguments.folder is None:
            with _own_folder() as folder:
                return _play_all(folder, found, to, again, download=arguments.download, brief=arguments.brief)
        if arguments.own_network:
            raise_loopback()
        Newcomer(arguments.folder, to, download=arguments.download, brief=arguments.brief).read(found)
    except Astray as astray:
        log(str(astray))
        return 1
    return 0


def main() -> int:
    """Play README. Returns the exit code."""
    arguments = parser_of(__doc__ or "").parse_args()
    return follow(steps((ROOT / README.page).read_text()), README, arguments, [__file__])


if __name__ == "__main__":
    sys.exit(main())
