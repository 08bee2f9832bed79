"""`pixiu audit`: is what was written down still whole?

Source: docs/security.md, "The audit log".
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from cluster.trust.audit import verify as verify_chain
from pixiu.errors import MalformedData
from tools.cli.output import AsJson, guarded, print_json, print_text

EXIT_CHANGED: Final = 1

audit = typer.Typer(help="The audit logs that processes keep.", no_args_is_help=True)


@audit.callback()
def _group() -> None:
    """The audit logs that processes keep."""


@audit.command()
@guarded
def verify(
    path: Annotated[Path, typer.Argument(help="A file of an audit log, or its folder.", metavar="FILE|FOLDER")],
    as_json: AsJson = False,
) -> None:
    """Check that no line was changed, removed or put in. Exit code 1: one was, or one is missing."""
    try:
        found = verify_chain(path)
    except MalformedData as error:
        if as_json:
            print_json({"error": {"code": error.code, "text": str(error)}})
        sys.stderr.write(f"pixiu: {error}\n")
        raise typer.Exit(EXIT_CHANGED) from None
    if as_json:
        print_json(asdict(found))
        return
    older = f"; the {found.first - 1} before are in older files, or were removed" if found.first > 1 else ""
    print_text(f"{found.lines} lines, {found.first} to {found.last}{older}")
    print_text(f"the last one's hash: {found.head}")
