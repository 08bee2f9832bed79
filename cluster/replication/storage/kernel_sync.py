"""Sync a file without a thread: Linux syncs in the kernel, and wakes the event loop when that is done.

    event loop ── io_submit(FDSYNC) ──▶ a thread of the kernel: as fdatasync
        ▲                                        │
        └── add_reader ◀──── eventfd ◀───────────┘

`io_submit` does not wait for the disk, so a disk that hangs holds nobody up. Where the processor, the kernel or a sandbox has none
of this, `KernelSync.begin` returns False, and a thread has to sync.

Source: docs/replication.md, "The path of an entry".
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable
from typing import Final, NamedTuple


class _Calls(NamedTuple):
    """Numbers of the system calls on one kind of processor, since libc has no functions for them."""

    setup: int
    destroy: int
    getevents: int
    submit: int


_CALLS: Final = {"x86_64": _Calls(206, 207, 208, 209), "aarch64": _Calls(0, 1, 4, 2)}
_IOCB: Final = struct.Struct("<QIiHhIQQqQII")
"""`struct iocb`: data, key, flags, operation, priority, file, buffer, bytes, offset, reserved, flags, eventfd."""
_EVENT: Final = struct.Struct("<QQqq")
"""`struct io_event`: data, iocb, result, second result."""
_FDSYNC: Final = 3
_BY_EVENTFD: Final = 1
assert _IOCB.size == 64
assert _EVENT.size == 32


class KernelSync:
    """Syncs one file at a time."""

    def __init__(self) -> None:
        self._calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
        self._context = ctypes.c_ulong(0)
        self._eventfd = -1
        self._iocb, self._event = ctypes.create_string_buffer(_IOCB.size), ctypes.create_string_buffer(_EVENT.size)
        self._iocbs = (ctypes.c_void_p * 1)(ctypes.addressof(self._iocb))
        self._done: Callable[[int], None] | None = None
        # PyDLL keeps the interpreter's lock: these calls are short, and other threads would take their turn at each of them.
        self._call = ctypes.PyDLL(None).syscall
        self._call.restype = ctypes.c_long

    def begin(self, fd: int, done: Callable[[int], None]) -> bool:
        """Begin to sync what was written to a file; no other sync may be under way. Returns False if this is not possible here.

        done: called in the event loop with 0, or with the number of the error. Not called after `close`.
        """
        assert self._done is None, "one at a time"
        calls = self._calls
        if calls is None or (self._eventfd < 0 and not self._open(calls)):
            return False
        _IOCB.pack_into(self._iocb, 0, 0, 0, 0, _FDSYNC, 0, fd, 0, 0, 0, 0, _BY_EVENTFD, self._eventfd)
        if self._call(ctypes.c_long(calls.submit), self._context, ctypes.c_long(1), self._iocbs) != 1:
            self._calls = None  # an old kernel: the next one will not be possible either
            return False
        self._done = done
        return True

    async def close(self) -> None:
        """Report nothing more. A sync under way is left to the kernel, which waits for it at the process's end."""
        waits, self._done, calls, self._calls = self._done is not None, None, self._calls, None
        if self._eventfd < 0:
            return
        asyncio.get_running_loop().remove_reader(self._eventfd)
        os.close(self._eventfd)
        self._eventfd = -1
        if calls is not None and not waits:
            await asyncio.to_thread(ctypes.CDLL(None).syscall, ctypes.c_long(calls.destroy), self._context)

    def _open(self, calls: _Calls) -> bool:
        try:
            self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:  # too many open files
            return False
        if self._call(ctypes.c_long(calls.setup), ctypes.c_long(1), ctypes.byref(self._context)) != 0:
            self._calls = None
            return False
        asyncio.get_running_loop().add_reader(self._eventfd, self._ready)
        return True

    def _ready(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        calls, done = self._calls, self._done
        if calls is None or done is None:
            return
        if self._call(ctypes.c_long(calls.getevents), self._context, ctypes.c_long(0), ctypes.c_long(1), self._event, None) != 1:
            return
        self._done = None
        done(-_EVENT.unpack(self._event.raw)[2])
