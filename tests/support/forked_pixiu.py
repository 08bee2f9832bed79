"""The `pixiu` command for a process that has imported what it needs, which is most of what a command takes:
`python -m tests.support.forked_pixiu FOLDER ARGUMENTS…`, with the files `input` and `errors` there. The fork server of `pixiu up`
is a fork of it, too."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from typing import Any

from onebox import fork_server
from onebox.children import child_environment
from onebox.fork_server import PRELOADED, ForkServer
from tools.cli.main import allow_open_files, main

LAUNCH = ForkServer._launch
UP = "up"
FORKED_IMPORT = "PIXIU_FORKED_IMPORT"
"""Variable with a module that all processes of the cluster have imported."""


class Fork:
    """A child of this process, with what a `ForkServer` needs of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """Send SIGKILL. It is not reaped before `wait`."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Reap it. Returns its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_first() -> None:
    """Fork the fork server before there is a thread or a socket. Does not return in it, nor in what it forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        os.dup2(theirs.fileno(), 0)
        theirs.close()
        os.environ.update(child_environment())
        if FORKED_IMPORT in os.environ:
            importlib.import_module(os.environ[FORKED_IMPORT])
        fork_server.main(PRELOADED)
        sys.exit()
    theirs.close()

    def launch(self: ForkServer) -> Any:
        """The first one is there. One after it is a user's."""
        ForkServer._launch = LAUNCH  # type: ignore[method-assign]
        return ours, Fork(pid)

    ForkServer._launch = launch  # type: ignore[method-assign]


if __name__ == "__main__":
    if folder := sys.argv.pop(1):
        os.dup2(os.open(f"{folder}/input", os.O_RDONLY), 0)
        os.dup2(os.open(f"{folder}/errors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    if sys.argv[1] == UP:
        allow_open_files()
        fork_first()
    main()
