"""A disk whose power can be cut: a file served over FUSE to a loop device. Needs Linux, root and /dev/fuse.

What is written lies in the disk's cache until the kernel asks for a flush (a barrier of the file system, the end of an `fsync`).
When the power goes, every 4,096-byte sector written since the last flush is kept or lost by chance, each for itself; what was
flushed is kept. From then on the disk answers EIO, until the power is back.

    python -m benchmarks.power_disk FOLDER MIB LIES

LIES: the newest so many sectors stay in the cache in spite of a flush, and are all lost.
It serves FOLDER/disk until its standard input ends; a line of JSON there is a command, its answer a line of JSON:
{"cut": SEED, "after": WRITES} cuts the power once so many further writes have come; {"on": 1} puts it back.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import random
import select
import struct
import sys
from typing import Final

SECTOR_BYTES: Final = 4096
HEADER: Final = struct.Struct("<IIQQIIIHH")
ANSWER: Final = struct.Struct("<IiQ")
IO: Final = struct.Struct("<QQIIQII")
MAX_WRITE_BYTES: Final = 1 << 20
ROOT, FILE = 1, 2
LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC = 1, 2, 3, 4, 14, 15, 16, 17, 18, 20
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS, DESTROY, BATCH_FORGET = 25, 26, 27, 28, 29, 34, 38, 42
DIRECT_IO: Final = 1
"""Nothing of the file is in the page cache: each write of the loop device comes here, and each read."""
BIG_WRITES, MAX_PAGES = 1 << 5, 1 << 22
FOREVER_S: Final = 1 << 30


class Platters:
    """What is on the disk, and what its cache has besides."""

    def __init__(self, size: int, lies: int) -> None:
        self.size, self._lies = size, lies
        self.now, self.flushed = mmap.mmap(-1, size), mmap.mmap(-1, size)
        """As it is read; as of the last flush."""
        self.cache: list[tuple[int, bytes]] = []
        """Offset and data of each sector that was written since the last flush, in order."""
        self.off = False

    def write(self, offset: int, data: bytes) -> None:
        """Into the cache."""
        self.now[offset : offset + len(data)] = data
        at = 0
        while at < len(data):
            part = SECTOR_BYTES - (offset + at) % SECTOR_BYTES
            self.cache.append((offset + at, data[at : at + part]))
            at += part

    def flush(self) -> None:
        """The cache to the platters."""
        end = max(len(self.cache) - self._lies, 0)
        for offset, data in self.cache[:end]:
            self.flushed[offset : offset + len(data)] = data
        del self.cache[:end]

    def cut(self, seed: int) -> dict[str, int]:
        """The power goes. How many sectors were in the cache, and how many of them are lost."""
        chance, lost = random.Random(seed), 0
        share = 1.0 if self._lies else chance.choice((0.0, 0.5, 0.9, 1.0))
        for offset, data in self.cache:
            if chance.random() < share:
                lost += 1
            else:
                self.flushed[offset : offset + len(data)] = data
        found = {"cached": len(self.cache), "lost": lost}
        self.cache.clear()
        self.now[:] = self.flushed[:]
        self.off = True
        return found


class Server:
    """FUSE's side of it: one folder with one file."""

    def __init__(self, platters: Platters) -> None:
        self._platters = platters
        self.cut_at: tuple[int, int] | None = None
        """Writes that come before the power goes, and the seed of what is lost."""
        self.cut: dict[str, int] = {}

    def _attributes(self, node: int) -> bytes:
        mode, size = (0o40755, 0) if node == ROOT else (0o100600, self._platters.size)
        return struct.pack("<6Q10I", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, SECTOR_BYTES, 0)

    def answer(self, request: bytes) -> bytes | None:
        """To one request; None for those that want none."""
        _, operation, unique, node, *_ = HEADER.unpack_from(request)
        if operation in (FORGET, BATCH_FORGET):
            return None
        try:
            body = self._do(operation, node, request[HEADER.size :])
        except OSError as error:
            return ANSWER.pack(ANSWER.size, -(error.errno or errno.EIO), unique)
        return ANSWER.pack(ANSWER.size + len(body), 0, unique) + body

    def _do(self, operation: int, node: int, body: bytes) -> bytes:
        if operation in (READ, WRITE, FSYNC) and node == FILE:
            return self._transfer(operation, body)
        if operation == INIT:
            return struct.pack("<IIIIHHIIHHI7I", 7, 31, 0, BIG_WRITES | MAX_PAGES, 16, 12, MAX_WRITE_BYTES, 1, 256, *[0] * 9)
        if operation == LOOKUP:
            if body != b"disk\0":
                raise OSError(errno.ENOENT, "no such file")
            return struct.pack("<4QII", FILE, 0, FOREVER_S, FOREVER_S, 0, 0) + self._attributes(FILE)
        if operation in (GETATTR, SETATTR):
            return struct.pack("<QII", FOREVER_S, 0, 0) + self._attributes(node)
        if operation in (OPEN, OPENDIR):
            return struct.pack("<QII", 0, DIRECT_IO if operation == OPEN else 0, 0)
        if operation == STATFS:
            return bytes(80)
        if operation in (RELEASE, RELEASEDIR, FLUSH, READDIR, ACCESS, DESTROY, FSYNC):
            return b""
        raise OSError(errno.ENOSYS, "not served")

    def _transfer(self, operation: int, body: bytes) -> bytes:
        platters = self._platters
        if platters.off:
            raise OSError(errno.EIO, "no power")
        if operation == FSYNC:
            platters.flush()
            return b""
        _, offset, size, *_ = IO.unpack_from(body)
        if operation == READ:
            return platters.now[offset : offset + size]
        platters.write(offset, body[IO.size : IO.size + size])
        if self.cut_at is not None:
            left, seed = self.cut_at
            self.cut_at = left - 1, seed
            if left <= 1:
                self.cut, self.cut_at = platters.cut(seed), None
                raise OSError(errno.EIO, "no power")
        return struct.pack("<II", size, 0)


def serve(folder: str, mib: int, lies: int) -> None:
    """Until standard input ends."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,max_read={MAX_WRITE_BYTES}".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"pixiu-power-disk", os.fsencode(folder), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), f"no FUSE mount at {folder}")
    platters = Platters(mib << 20, lies)
    server = Server(platters)
    buffer = bytearray(MAX_WRITE_BYTES + SECTOR_BYTES * 2)
    waiting = False
    print(json.dumps({"serving": 1}), flush=True)
    try:
        while True:
            ready, _, _ = select.select([device, sys.stdin], [], [])
            if device in ready:
                got = os.readv(device, [buffer])
                answer = server.answer(bytes(memoryview(buffer)[:got]))
                if answer is not None:
                    os.write(device, answer)
            if waiting and platters.off:
                print(json.dumps(server.cut), flush=True)
                waiting = False
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                command = json.loads(line)
                if "cut" in command:
                    server.cut_at, waiting = (command["after"], command["cut"]), True
                else:
                    platters.off = False
                    print(json.dumps({"on": 1}), flush=True)
    finally:
        libc.umount2(os.fsencode(folder), 2)  # MNT_DETACH: whoever still has it open gets an error
        os.close(device)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
