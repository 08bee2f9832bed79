"""What gRPC finds in `GRPC_VERBOSITY` when it is imported: it reads it then, and prints to stderr what peers send."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import importlib.abc, os, sys
class Watching(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"))
sys.meta_path.insert(0, Watching())
import {}
import grpc
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("module", "given", "kept"),
    [("pixiu", None, "NONE"), ("pixiu", "DEBUG", "DEBUG"), ("relay.service", None, "NONE"), ("tools.cli.main", None, "NONE")],
)
def test_grpc_prints_nothing_unless_the_program_says_otherwise(module: str, given: str | None, kept: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    environment |= {"GRPC_VERBOSITY": given} if given else {}
    program = PROGRAM.format(module)
    said = subprocess.run([sys.executable, "-c", program], check=True, env=environment, stdout=subprocess.PIPE, text=True)
    assert said.stdout.split() == [kept]
