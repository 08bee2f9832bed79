"""`python -m proxy --config FILE`: one proxy."""

from __future__ import annotations

import sys

from cluster.process.host import run_role
from proxy.options import Options
from proxy.service import Service
from registry.membership import Membership

if __name__ == "__main__":
    sys.exit(run_role("proxy", Options, Service, sys.argv[1:], membership=Membership))
