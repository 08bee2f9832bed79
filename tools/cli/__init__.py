"""The `pixiu` command."""

import os

# gRPC writes each lost connection to stderr; the commands report what matters themselves. Set before gRPC is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
