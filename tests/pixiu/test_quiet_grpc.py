"""What importing the SDK sets for gRPC, which prints lost connections to stderr otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = "import os, sys; import pixiu; print(os.environ['GRPC_VERBOSITY'], 'grpc' in sys.modules)"


@pytest.mark.process
@pytest.mark.parametrize(("given", "kept"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_prints_errors_alone_unless_the_program_says_otherwise(given: str | None, kept: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    environment |= {"GRPC_VERBOSITY": given} if given else {}
    said = subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment, stdout=subprocess.PIPE, text=True)
    assert said.stdout.split() == [kept, "False"], "gRPC reads it when it is imported"
