"""The servers' kernel."""

import pixiu as pixiu  # before gRPC is imported, which it makes quiet
