"""Plays scenarios by their names: `python -m tests.clients.scenarios.python TARGET`, lines on stdin and stdout."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable

from tests.clients.scenarios.python import connecting, harm, mail, rooms, topics  # noqa: F401  they fill SCENARIOS
from tests.clients.scenarios.python.play import SCENARIOS, Failed, Play


def say(line: str) -> None:
    """One line to the harness."""
    print(" ".join(line.split()), flush=True)


class Driver:
    """The conversation with the harness. Belongs to the event loop in which it is made."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._lines = asyncio.StreamReader()

    async def run(self) -> None:
        """Play what the harness names, until the end of stdin."""
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._lines), sys.stdin)
        while line := (await self._lines.readline()).decode():
            verb, name, seed = line.split()
            assert verb == "play", line
            say(await self._verdict(name, int(seed)))

    async def _verdict(self, name: str, seed: int) -> str:
        if name not in SCENARIOS:
            return f"failed {name} this driver does not know it"
        play = Play(self._target, seed, self._ask)
        try:
            try:
                await SCENARIOS[name](play)
            finally:
                await play.ends.aclose()
        except Failed as why:
            return f"failed {name} {why}"
        except Exception as error:
            traceback.print_exc()
            return f"failed {name} {type(error).__name__}: {error}"
        return f"ok {name}"

    def _ask(self, *words: object) -> Awaitable[str]:
        say(" ".join(("ask", *map(str, words))))

        async def answer() -> str:
            verb, _, rest = (await self._lines.readline()).decode().rstrip("\n").partition(" ")
            if verb != "done":
                raise Failed(f"{words}: {rest}")
            return rest

        return answer()


async def play(target: str) -> None:
    """Play against a cluster."""
    await Driver(target).run()


def main() -> int:
    """Play, or print the names of the scenarios."""
    if sys.argv[1:] == ["--names"]:
        print("\n".join(SCENARIOS))
        return 0
    if len(sys.argv) != 2:
        print("usage: python -m tests.clients.scenarios.python TARGET, or --names", file=sys.stderr)
        return 2
    asyncio.run(play(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
