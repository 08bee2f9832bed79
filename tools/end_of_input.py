"""`--until-eof`: the end of standard input as a signal to end, for a command that another program starts.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Final

from pixiu.errors import ConfigurationError

STDIN: Final = 0


def on_end_of_input(end: Callable[[], object]) -> None:
    """Call a function once, when standard input is closed; what is written to it is dropped. Call it before anything starts.

    Raises `ConfigurationError` when standard input is closed already, or is a file or /dev/null, for which nothing can wait.
    """
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            if os.read(STDIN, 4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # its terminal is gone, or its socket was reset
        loop.remove_reader(STDIN)
        end()

    if sys.stdin is None:  # number 0 may be a file of our own by now
        raise ConfigurationError("--until-eof: standard input is closed; give a pipe, socket or terminal")
    try:
        loop.add_reader(STDIN, read)
    except OSError:
        raise ConfigurationError("--until-eof: standard input is not a pipe, socket or terminal") from None
