"""Disks of which the power can be cut: a file system for each data folder, on a loop device over a file.

    SIGKILL of all that use it ─┐ in any order
    ext4 is shut down as it is ─┴─▶ unmounted ──▶ mounted: its journal is replayed, all that was not synced is gone

The shutdown (`EXT4_IOC_SHUTDOWN` without a flush of the log, as xfstests cut the power) stops every write to the device at once,
so nothing of the page cache reaches it any more. Commits come with syncs alone (`commit=300`), and a rename or truncation syncs
nothing by itself (`noauto_da_alloc`). What this does not show: a disk that loses or reorders what it was given before a flush, and
a file system that keeps less than ext4 does, where a sync of one file brings the names of all. `tests/sim/power_cut` does.

Needs Linux, root, and loop devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

SHUTDOWN: Final = 2 << 30 | 4 << 16 | ord("X") << 8 | 125
"""EXT4_IOC_SHUTDOWN: _IOR('X', 125, __u32)."""
NO_LOG_FLUSH: Final = struct.pack("=I", 2)
IMAGE_BYTES: Final = 1 << 30
OPTIONS: Final = "loop,commit=300,noauto_da_alloc"
WAIT_S: Final = 20.0
NO_SYNCS: Final = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/syscall.h>
long syscall(long number, ...) {  // syncs by the kernel's threads are not there
    va_list rest;
    long each[6];
    va_start(rest, number);
    for (int at = 0; at < 6; at++) each[at] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_io_setup) { errno = ENOSYS; return -1; }
    long (*real)(long, ...) = dlsym(RTLD_NEXT, "syscall");
    return real(number, each[0], each[1], each[2], each[3], each[4], each[5]);
}
int fsync(int file) { (void)file; return 0; }
int fdatasync(int file) { (void)file; return 0; }
int msync(void *at, size_t size, int how) { (void)at; (void)size; (void)how; return 0; }
"""
"""A library by which processes sync nothing: a cut must then break promises, or this cuts nothing."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Disk:
    """One of them.

    Args:
        folder: at which it is mounted. It is made, and holds nothing else.
        image: the file that has its content.
    """

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self._image = folder, image
        folder.mkdir(mode=0o700, parents=True)
        _run("chattr", "+i", str(folder))  # nobody writes below it while nothing is mounted
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1", str(image))
        self._mount()
        (folder / "lost+found").rmdir()
        folder.chmod(0o700)
        _run("sync", "-f", str(folder))

    def _mount(self) -> None:
        _run("mount", "-o", OPTIONS, str(self._image), str(self.folder))

    def users(self) -> list[int]:
        """The processes that have files of it open."""
        found, below = list[int](), str(self.folder)
        for process in Path("/proc").iterdir():
            if process.name.isdecimal():
                with contextlib.suppress(OSError):
                    if any(os.readlink(each).startswith(below) for each in (process / "fd").iterdir()):
                        found.append(int(process.name))
        return found

    def shut_down(self) -> None:
        """From now on nothing reaches the device."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, NO_LOG_FLUSH)
        finally:
            os.close(descriptor)

    def come_back(self) -> None:
        """Mount what the device has. Raises OSError while somebody uses it."""
        end = time.monotonic() + WAIT_S
        while True:
            for pid in self.users():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                _run("umount", str(self.folder))
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
        self._mount()

    def remove(self) -> None:
        """Unmount it, and remove it."""
        _run("umount", str(self.folder))
        _run("chattr", "-i", str(self.folder))
        self._image.unlink()


def cut(disks: Sequence[Disk], supervisor: int, rolls: random.Random) -> int:
    """Cut the power of disks and of what runs on them, and turn it on again. Returns the number of processes that it ended.

    Args:
        supervisor: process that starts others again. It is stopped meanwhile.
    """
    os.kill(supervisor, signal.SIGSTOP)
    try:
        pids = [pid for disk in disks for pid in disk.users()]
        steps = [disk.shut_down for disk in disks] + [lambda pid=pid: _kill(pid) for pid in pids]
        rolls.shuffle(steps)
        for step in steps:
            step()
        for disk in disks:
            disk.come_back()
    finally:
        os.kill(supervisor, signal.SIGCONT)
    return len(pids)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def disks(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Disk]]:
    """Disks at the data folders of processes that `pixiu up --data FOLDER/run` will have, by name. Raises OSError without the
    right to mount."""
    made: dict[str, Disk] = {}
    try:
        (folder / "run").mkdir(mode=0o700)
        for name in names:
            made[name] = Disk(folder / "run" / name, folder / f"{name}.img")
        yield made
    finally:
        for disk in made.values():
            disk.remove()
