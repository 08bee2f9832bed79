"""`python -m xiu --config FILE`: one Xiu."""

from __future__ import annotations

import sys

from cluster.process.host import run_role
from registry.membership import Membership
from xiu.options import Options
from xiu.service import Service

if __name__ == "__main__":
    sys.exit(run_role("xiu", Options, Service, sys.argv[1:], membership=Membership))
