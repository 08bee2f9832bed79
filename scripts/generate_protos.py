"""Generate `pixiu/wire/v1` from `proto/`: messages, services and type stubs.

Run by `make proto`; the generated code is committed, so that users need no compiler.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run protoc over every file in `proto/`. Returns protoc's exit code."""
    protos = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}",
        f"--python_out={ROOT}", f"--grpc_python_out={ROOT}", f"--mypy_out={ROOT}", f"--mypy_grpc_out={ROOT}",
        *protos,
    ]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, check=False).returncode
    for package in (ROOT / "pixiu/wire", ROOT / "pixiu/wire/v1"):
        (package / "__init__.py").touch()
    for name in ("control", "delivery", "tickets"):  # they have no service
        for empty in (ROOT / "pixiu/wire/v1").glob(f"{name}_pb2_grpc.py*"):
            empty.unlink()
    return result


if __name__ == "__main__":
    sys.exit(main())
