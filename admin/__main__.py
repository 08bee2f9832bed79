"""`python -m admin --config FILE`: one admin."""

from __future__ import annotations

import sys

from admin.options import Options
from admin.service import Service
from cluster.process.host import run_role
from registry.membership import Membership

if __name__ == "__main__":
    sys.exit(run_role("admin", Options, Service, sys.argv[1:], membership=Membership))
