"""Generate `pixiu/wire/v1` and `cluster/wire/v1` from `proto/`: messages, services and type stubs.

Run by `make proto`; the generated code is committed, so that users need no compiler.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "proto"


def main() -> int:
    """Run protoc over every file in `proto/`. Returns protoc's exit code."""
    protos = sorted(path.relative_to(PROTOS) for path in PROTOS.rglob("*.proto"))
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}",
        f"--python_out={ROOT}", f"--grpc_python_out={ROOT}", f"--mypy_out={ROOT}", f"--mypy_grpc_out={ROOT}",
        *map(str, protos),
    ]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, check=False).returncode
    for proto in protos:
        for package in (ROOT / proto.parent, ROOT / proto.parent.parent):
            (package / "__init__.py").touch()
        if not re.search(r"^service ", (PROTOS / proto).read_text(), re.MULTILINE):
            for empty in (ROOT / proto.parent).glob(f"{proto.stem}_pb2_grpc.py*"):
                empty.unlink()
    return result


if __name__ == "__main__":
    sys.exit(main())
