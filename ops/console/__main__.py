"""`python -m ops.console`: `pixiu console`, for a process that starts it."""

from __future__ import annotations

import typer

from ops.console.command import console

if __name__ == "__main__":
    typer.run(console)
