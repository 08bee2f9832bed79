"""Machines of a network with a small MTU: network namespaces of Linux, each joined to a bridge by a veth pair.

    this test's namespace ── 198.18.N.1 ── bridge ─┬─ veth ── 198.18.N.2, machine 1
                                                   └─ veth ── 198.18.N.3, machine 2

N is free on this machine: who makes the bridge that is named after it has it, so that several runs do not meet.
A process in a namespace reaches the others by these addresses, and nothing else but its own loopback.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.support.forks import PROJECT

NETWORKS = "198.18."
"""With a number from 0 to 255 behind it. Of the range that is kept for tests of networks (RFC 2544)."""
MTU_BYTES = 1400
COMMAND_S = 20.0
END_S = 60.0


class NotPermitted(Exception):
    """The kernel or this process's rights do not allow namespaces."""


class Exists(NotPermitted):
    """Somebody has it already."""


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except OSError as error:
        raise NotPermitted(f"ip: {error.strerror}") from error
    if done.returncode:
        if "File exists" in done.stderr:
            raise Exists(f"ip {' '.join(words)}: {done.stderr.strip()}")
        raise NotPermitted(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Machine:
    """A network namespace."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    def run(self, arguments: Sequence[str], output: int | IO[bytes]) -> subprocess.Popen[bytes]:
        """`python ARGUMENTS…` in it."""
        command = ["ip", "netns", "exec", self.name, sys.executable, *arguments]
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


class Network:
    """Some machines, and the address at which they reach this process."""

    def __init__(self, machines: list[Machine], address: str) -> None:
        self.machines = machines
        self.address = address
        self._running: list[subprocess.Popen[bytes]] = []

    def role(self, machine: Machine | None, role: str, log: Path, *settings: str, insecure: bool = True) -> None:
        """Start a role in a machine; None: beside this process. insecure: nobody proves anything at the cluster's door."""
        host = self.address if machine is None else machine.address
        arguments = ["-m", role, "--set", f"host={host}", *(("--set", "cluster_insecure=true") if insecure else ())]
        for setting in settings:
            arguments += ["--set", setting]
        with log.open("wb") as output:
            if machine is None:
                command = [sys.executable, *arguments]
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            else:
                process = machine.run(arguments, output)
        self._running.append(process)

    def all_run(self) -> bool:
        """Whether no role has ended."""
        return all(process.poll() is None for process in self._running)

    def stop(self) -> list[int]:
        """End the roles in good order, else by force. Returns their exit codes."""
        codes = []
        for process in reversed(self._running):
            process.send_signal(signal.SIGTERM)
            try:
                codes.append(process.wait(END_S))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait(END_S))
        self._running.clear()
        return codes


def _bridge() -> tuple[int, str]:
    """Make a bridge. Returns the number of its network, which nobody else has, and its name."""
    for number in range(os.getpid(), os.getpid() + 256):
        name = f"pxb{number % 256}"
        try:
            _ip("link", "add", name, "type", "bridge")
        except Exists:
            continue
        return number % 256, name
    raise NotPermitted(f"all networks {NETWORKS}0 to {NETWORKS}255 are taken: remove bridges pxb0 to pxb255 that ended tests left")


@contextmanager
def network(count: int) -> Iterator[Network]:
    """A network of so many machines, gone afterwards. Skips the test, and says why, where it is not allowed."""
    with ExitStack() as undo:
        try:
            tag, bridge = _bridge()
            addresses = f"{NETWORKS}{tag}."
            undo.callback(_ip, "link", "del", bridge)
            _ip("addr", "add", f"{addresses}1/24", "dev", bridge)
            machines = []
            for number in range(count):
                name, outside, inside = f"pixiu-{tag}-{number}", f"pxo{tag}-{number}", f"pxi{tag}-{number}"
                machine = Machine(name, f"{addresses}{number + 2}")
                _ip("netns", "add", name)
                undo.callback(_ip, "netns", "del", name)
                _ip("link", "add", outside, "mtu", str(MTU_BYTES), "type", "veth", "peer", "name", inside, "netns", name)
                undo.callback(_ip, "link", "del", outside)
                _ip("link", "set", outside, "master", bridge, "up")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "add", f"{machine.address}/24", "dev", inside)
                _ip("-n", name, "link", "set", inside, "mtu", str(MTU_BYTES), "up")
                machines.append(machine)
            _ip("link", "set", bridge, "mtu", str(MTU_BYTES), "up")
        except NotPermitted as error:
            pytest.skip(f"needs network namespaces: {error}")
        yield Network(machines, f"{addresses}1")
