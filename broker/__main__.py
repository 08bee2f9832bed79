"""`python -m broker --config FILE`: one broker."""

from __future__ import annotations

import sys

from broker.options import Options
from broker.service import Service
from cluster.process.host import run_role
from registry.membership import Membership

if __name__ == "__main__":
    sys.exit(run_role("broker", Options, Service, sys.argv[1:], membership=Membership))
