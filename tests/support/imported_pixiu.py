"""Imports every command of `pixiu`, before processes are forked that run one."""

from __future__ import annotations

from setproctitle import getproctitle

from tools.cli.main import application

getproctitle()  # it finds its memory before a process gets another environment
application()
