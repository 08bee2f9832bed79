"""A network between machines that loses, holds back and cuts: every IP packet, those of TCP too, by a seed.

    this test's namespace ── tun device 0 ──┐
    machine 1's namespace ── tun device 1 ──┼── this module as a program, which takes packets from one and gives them to another
    machine 2's namespace ── tun device 2 ──┘

`Impairment` says what it does now: a line of JSON on its standard input. When that ends it prints what became of packets, and ends.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tests.support.forks import PROJECT

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MAX_PACKET = 1 << 16
DRAIN = 64
IPV4 = 4
END_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Impairment:
    """What becomes of packets. As much for each path, whatever the others do."""

    lost: float = 0.0
    """The chance of each packet."""
    jitter_s: float = 0.0
    """Each packet waits for a time from 0 to this, so that later ones overtake it."""
    cut: tuple[tuple[int, int], ...] = ()
    """From which device to which one nothing comes."""


def open_device(name: str) -> int:
    """Make a TUN device, which is there while the descriptor that this returns is open. Raises `OSError`."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(device)
        raise
    return device


class BadNetwork:
    """The program, seen from the test. Device N has the address …N+1.

    Args:
        devices: descriptors of TUN devices, which are the program's from here on.
        seed: of all chances.
    """

    def __init__(self, devices: Sequence[int], seed: int) -> None:
        command = [sys.executable, "-m", "tests.support.bad_network", str(seed), *map(str, devices)]
        self._process = subprocess.Popen(
            command, pass_fds=devices, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PROJECT, text=True, start_new_session=True
        )
        for device in devices:
            os.close(device)
        self.counts: dict[str, int] = {}
        """Packets that passed, were lost, were cut and overtook another one."""

    def set(self, impairment: Impairment) -> None:
        """From now on packets fare so."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(impairment)) + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """End it. `counts` are right from then on."""
        said, _ = self._process.communicate(timeout=END_S)
        self.counts = json.loads(said)


class Forwarder:
    """The program: see the module."""

    def __init__(self, devices: Sequence[int], seed: int) -> None:
        self._devices = devices
        self._impairment = Impairment()
        self._chances = [[random.Random(f"{seed} {a} {b}") for b in range(len(devices))] for a in range(len(devices))]
        self._held: list[tuple[float, int, int, bytes]] = []
        """Until when, a number of its own, to which device, the packet."""
        self._last: dict[tuple[int, int], float] = {}
        """Of each path: until when its last packet is held."""
        self._number = 0
        self._said = b""
        self.counts = Counter({"passed": 0, "lost": 0, "cut": 0, "overtook": 0})

    def run(self) -> None:
        """Until standard input ends."""
        poll = select.epoll()
        own = {device: number for number, device in enumerate(self._devices)}
        for device in (*self._devices, sys.stdin.fileno()):
            poll.register(device, select.EPOLLIN)
        while True:
            timeout_s = max(0.0, self._held[0][0] - time.monotonic()) if self._held else None
            for descriptor, _ in poll.poll(timeout_s):
                if descriptor in own:
                    self._take(own[descriptor])
                elif not self._listen():
                    return
            now = time.monotonic()
            while self._held and self._held[0][0] <= now:
                _, _, receiver, packet = heapq.heappop(self._held)
                self._pass(receiver, packet)

    def _listen(self) -> bool:
        """Take what standard input says. False: it has ended."""
        data = os.read(sys.stdin.fileno(), MAX_PACKET)
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            said["cut"] = tuple(tuple(path) for path in said["cut"])
            self._impairment = Impairment(**said)
        return bool(data)

    def _take(self, sender: int) -> None:
        for _ in range(DRAIN):
            try:
                packet = os.read(self._devices[sender], MAX_PACKET)
            except BlockingIOError:
                return
            receiver = packet[19] - 1 if packet[0] >> 4 == IPV4 else -1
            if 0 <= receiver < len(self._devices) and receiver != sender:  # others are for everybody in a network, of IPv6 say
                self._arrived(sender, receiver, packet)

    def _arrived(self, sender: int, receiver: int, packet: bytes) -> None:
        impairment, chance = self._impairment, self._chances[sender][receiver]
        # As many numbers for every packet, whatever is asked for.
        lost, wait_s = chance.random() < impairment.lost, chance.random() * impairment.jitter_s
        if (sender, receiver) in impairment.cut:
            self.counts["cut"] += 1
        elif lost:
            self.counts["lost"] += 1
        elif wait_s:
            until, self._number = time.monotonic() + wait_s, self._number + 1
            self.counts["overtook"] += until < self._last.get((sender, receiver), 0.0)
            self._last[sender, receiver] = until
            heapq.heappush(self._held, (until, self._number, receiver, packet))
        else:
            self._pass(receiver, packet)

    def _pass(self, receiver: int, packet: bytes) -> None:
        try:
            os.write(self._devices[receiver], packet)
        except OSError as error:  # its machine goes, or has too much to do
            if error.errno not in (errno.EIO, errno.ENOBUFS, errno.EAGAIN):
                raise
            self.counts["lost"] += 1
        else:
            self.counts["passed"] += 1


if __name__ == "__main__":
    forwarder = Forwarder([int(word) for word in sys.argv[2:]], int(sys.argv[1]))
    forwarder.run()
    print(json.dumps(forwarder.counts))
