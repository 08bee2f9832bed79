"""Machines of a network with a small MTU: network namespaces of Linux, each joined to a bridge by a veth pair.

    this test's namespace ── 198.18.N.1 ── bridge ─┬─ veth ── 198.18.N.2, machine 1
                                                   └─ veth ── 198.18.N.3, machine 2

N is free on this machine: who makes the bridge that is named after it has it, so that several runs do not meet. A network that can
be bad has TUN devices in place of the veth pairs, and tests/support/bad_network.py in place of the bridge.

A process in a namespace reaches the others by these addresses, and nothing else but its own loopback.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TypeVar

import pytest

from tests.support.bad_network import BadNetwork, open_device
from tests.support.forks import PROJECT

NETWORKS = "198.18."
"""With a number from 0 to 255 behind it. Of the range that is kept for tests of networks (RFC 2544)."""
MTU_BYTES = 1400
TUN_PACKETS = 5000
"""That wait in a TUN device, when the program that takes them is late."""
COMMAND_S = 20.0
END_S = 60.0
Result = TypeVar("Result")


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
    """Some machines, and the address at which they reach this process.

    bad: what makes the network worse, if that was asked for. This process is 0 there, machine N of the list N+1.
    """

    def __init__(self, machines: list[Machine], address: str, bad: BadNetwork | None = None) -> None:
        self.machines = machines
        self.address = address
        self.bad = bad
        self._running: list[subprocess.Popen[bytes]] = []

    def role(self, machine: Machine | None, role: str, log: Path, *settings: str, insecure: bool = True) -> None:
        """Start a role in a machine; None: beside this process. insecure: nobody proves anything at the cluster's listener."""
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


def _first_free(make: Callable[[str], Result]) -> tuple[int, str, Result]:
    """The number of a network that nobody else has, the name of the device that says so, and what making that returned."""
    for number in range(os.getpid(), os.getpid() + 256):
        name = f"pxb{number % 256}"
        try:
            return number % 256, name, make(name)
        except Exists:
            continue
    raise NotPermitted(f"all networks {NETWORKS}0 to {NETWORKS}255 are taken: remove bridges pxb0 to pxb255 that ended tests left")


def _bridge(name: str) -> None:
    _ip("link", "add", name, "type", "bridge")


def _tun(name: str) -> int:
    try:
        return open_device(name)
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.EINVAL):  # it is another process's, or a bridge
            raise Exists(name) from error
        raise NotPermitted(f"TUN device {name}: {error.strerror}") from error


def _address(name: str, address: str, *, namespace: str = "") -> None:
    """Give a device an address of its network, and the MTU."""
    inside = ("-n", namespace) if namespace else ()
    _ip(*inside, "addr", "add", f"{address}/24", "dev", name)
    _ip(*inside, "link", "set", name, "mtu", str(MTU_BYTES), "up")


@contextmanager
def network(count: int, *, bad_by_seed: int | None = None) -> Iterator[Network]:
    """A network of so many machines, gone afterwards. Skips the test, and says why, where it is not allowed.

    bad_by_seed: it can be made worse, see `Network.bad`.
    """
    with ExitStack() as undo:
        devices: list[int] = []
        try:
            if bad_by_seed is None:
                tag, own, _ = _first_free(_bridge)
                undo.callback(_ip, "link", "del", own)
            else:
                tag, own, device = _first_free(_tun)
                devices.append(device)
            addresses = f"{NETWORKS}{tag}."
            machines = []
            for number in range(count):
                machine = Machine(f"pixiu-{tag}-{number}", f"{addresses}{number + 2}")
                outside, inside = f"pxo{tag}-{number}", f"pxi{tag}-{number}"
                _ip("netns", "add", machine.name)
                undo.callback(_ip, "netns", "del", machine.name)
                _ip("-n", machine.name, "link", "set", "lo", "up")
                if bad_by_seed is None:
                    _ip(
                        "link", "add", outside, "mtu", str(MTU_BYTES), "type", "veth", "peer", "name", inside, "netns", machine.name
                    )
                    undo.callback(_ip, "link", "del", outside)
                    _ip("link", "set", outside, "master", own, "up")
                else:
                    devices.append(_tun(inside))
                    _ip("link", "set", inside, "txqueuelen", str(TUN_PACKETS), "netns", machine.name)
                _address(inside, machine.address, namespace=machine.name)
                machines.append(machine)
            _address(own, f"{addresses}1")
        except NotPermitted as error:
            for device in devices:
                os.close(device)
            pytest.skip(f"needs network namespaces: {error}")
        bad = None
        if bad_by_seed is not None:
            bad = BadNetwork(devices, bad_by_seed)
            undo.callback(bad.stop)
        yield Network(machines, f"{addresses}1", bad)
