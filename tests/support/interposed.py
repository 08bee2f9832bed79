"""Disks that are slow to sync and wall clocks that are wrong, of one process or another, while they run. Needs Linux and `cc`.

A library in front of libc's, by LD_PRELOAD. What is wrong, and with whom, is in a file that every such process maps. Only the
interpreter's own clock is wrong: libraries such as gRPC take a jump of theirs for a hang.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path
from typing import Final

EVERY: Final = -1
"""In place of a PID: every process that has the library."""
FAULT: Final = struct.Struct("<qqq")
"""PID, µs that a sync takes longer, s that the wall clock is ahead."""
LIBRARY: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile struct fault { int64_t pid, sync_us, ahead_s; } *fault;
static void *interpreter;
static int (*real_clock)(clockid_t, struct timespec *);
static long (*real_syscall)(long, ...);
static int (*real_fdatasync)(int), (*real_fsync)(int), (*real_msync)(void *, size_t, int);

__attribute__((constructor)) static void begin(void) {
    Dl_info found;
    const char *name = getenv("PIXIU_TEST_FAULTS");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    real_syscall = dlsym(RTLD_NEXT, "syscall");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_msync = dlsym(RTLD_NEXT, "msync");
    void *python = dlsym(RTLD_DEFAULT, "Py_BytesMain");
    if (python && dladdr(python, &found)) interpreter = found.dli_fbase;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *fault, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) fault = mapped;
}

static int is_mine(void) {
    return fault && fault->pid && (fault->pid == -1 || fault->pid == getpid());
}

static void slow(void) {
    if (is_mine() && fault->sync_us) usleep(fault->sync_us);
}

int fdatasync(int file) { slow(); return real_fdatasync(file); }
int fsync(int file) { slow(); return real_fsync(file); }
int msync(void *at, size_t size, int flags) { slow(); return real_msync(at, size, flags); }

static void *submitted(void *given) {
    long *call = given;
    slow();
    real_syscall(SYS_io_submit, call[0], call[1], call[2]);
    free(call);
    return NULL;
}

/* A sync of the kernel is submitted later; whoever asked for it does not wait. */
long syscall(long number, ...) {
    va_list more;
    long all[6];
    va_start(more, number);
    for (int i = 0; i < 6; i++) all[i] = va_arg(more, long);
    va_end(more);
    if (!real_syscall) real_syscall = dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_io_submit && is_mine() && fault->sync_us) {
        pthread_t thread;
        long *call = malloc(3 * sizeof *call);
        for (int i = 0; call && i < 3; i++) call[i] = all[i];
        if (call && !pthread_create(&thread, NULL, submitted, call)) return pthread_detach(thread), 1;
        abort();
    }
    return real_syscall(number, all[0], all[1], all[2], all[3], all[4], all[5]);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    Dl_info caller;
    int done = real_clock ? real_clock(clock, now) : -1;
    if (clock == CLOCK_REALTIME && is_mine() && fault->ahead_s && dladdr(__builtin_return_address(0), &caller)
        && caller.dli_fbase == interpreter) now->tv_sec += fault->ahead_s;
    return done;
}
"""


def compiled(text: str, folder: Path, name: str) -> Path:
    """A library of this source. Raises RuntimeError where there is no C compiler."""
    source, library = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(text)
    try:
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-pthread"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"what stands before libc needs a C compiler as `cc`: {error}") from error
    return library


class Interposed:
    """The library, and what is wrong with whom; nothing at first.

    Raises RuntimeError where there is no C compiler.
    """

    def __init__(self, folder: Path) -> None:
        self._library, self._file = compiled(LIBRARY, folder, "faults"), folder / "faults"
        self._file.write_bytes(bytes(FAULT.size))
        with self._file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 0)

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes with which something may be wrong."""
        return {"LD_PRELOAD": str(self._library), "PIXIU_TEST_FAULTS": str(self._file)}

    def begin(self, pid: int, *, sync_us: int = 0, ahead_s: int = 0) -> None:
        """One process, or EVERY one, is bad from now on; all others are well."""
        self._map[:] = FAULT.pack(pid, sync_us, ahead_s)

    def end(self) -> None:
        """All are well."""
        self._map[:] = bytes(FAULT.size)
