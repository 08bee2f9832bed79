"""`python -m topic --config FILE`: one replica of a group of topics."""

from __future__ import annotations

import sys

from cluster.process.host import run_role
from registry.membership import Membership
from topic.options import Options
from topic.service import Service

if __name__ == "__main__":
    sys.exit(run_role("topic", Options, Service, sys.argv[1:], membership=Membership))
