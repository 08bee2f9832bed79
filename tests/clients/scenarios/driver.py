"""Drivers of the SDKs: how each is built and started, and the conversation with one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tests.clients.scenarios.favours import Favours
from tests.clients.scenarios.table import ROOT

PATIENT_S: Final = 240.0
"""Longest time of one scenario, seconds."""
BUILT: Final = Path(os.environ.get("PIXIU_CLIENTS", Path(tempfile.gettempdir()) / f"pixiu-clients-{os.getuid()}"))
"""Folder of what is built."""


@dataclass(frozen=True)
class Language:
    """A language: the folder of its sources, the command that builds the driver there, and the driver's command."""

    folder: Path
    build: tuple[str, ...]
    """Empty: there is nothing to build."""
    command: tuple[str, ...]

    def prepare(self) -> None:
        """Build the driver. Raises CalledProcessError."""
        BUILT.mkdir(parents=True, exist_ok=True)
        if self.build:
            subprocess.run(self.build, cwd=self.folder, check=True, timeout=600)

    def names(self) -> list[str]:
        """The scenarios that the driver knows."""
        command = [*self.command, "--names"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True, timeout=60)
        return sorted(done.stdout.split())


GO_DRIVER: Final = f"{BUILT}/scenarios-go"
LANGUAGES: Final = {
    "python": Language(ROOT, (), (sys.executable, "-m", "tests.clients.scenarios.python")),
    "go": Language(ROOT / "sdk/go", ("go", "build", "-o", GO_DRIVER, "./internal/scenarios"), (GO_DRIVER,)),
    "typescript": Language(
        ROOT / "sdk/typescript", ("npm", "run", "--silent", "build"), ("node", f"{ROOT}/sdk/typescript/build/scenarios/driver.js")
    ),
}


class Driver:
    """A driver under way. Usable by `async with`."""

    def __init__(self, language: Language, target: str, environment: Mapping[str, str] | None = None) -> None:
        self._command, self._folder = [*language.command, target], language.folder
        self._environment = {**os.environ, **(environment or {})}
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, env=self._environment, cwd=self._folder
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def play(self, name: str, seed: int, favours: Favours) -> str:
        """Play a scenario. Returns "ok", "lacks …", or what does not hold."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"play {name} {seed}\n".encode())
        try:
            async with asyncio.timeout(PATIENT_S):
                while line := (await process.stdout.readline()).decode().rstrip("\n"):
                    if line.startswith("ask "):
                        process.stdin.write(f"{await favours.answer(line)}\n".encode())
                        continue
                    verdict, _, rest = line.partition(" ")
                    why = rest.removeprefix(name).strip()
                    return "ok" if verdict == "ok" else f"lacks: {why}" if verdict == "lacks" else why or line
        except TimeoutError:
            process.kill()
            return f"no verdict in {PATIENT_S:.0f} s"
        return "the driver ended"
