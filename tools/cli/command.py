"""Entry point of the `pixiu` command: names the packages to install if the command's own are missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. Exit code 2 when typer or rich is not installed."""
    try:
        from tools.cli.main import main as run
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"pixiu: the command needs {missing.name}: pip install 'pixiu-sdk[cli]'\n")
        sys.exit(2)
    run()
