"""`python -m relay --config FILE`: one relay."""

from __future__ import annotations

import sys

from cluster.process.host import run_role
from registry.membership import Membership
from relay.options import Options
from relay.service import Service

if __name__ == "__main__":
    sys.exit(run_role("relay", Options, Service, sys.argv[1:], membership=Membership))
