"""`python -m pi --config FILE`: one replica of a Pi partition."""

from __future__ import annotations

import sys

from cluster.process.host import run_role
from pi.options import Options
from pi.service import Service
from registry.membership import Membership

if __name__ == "__main__":
    sys.exit(run_role("pi", Options, Service, sys.argv[1:], membership=Membership))
