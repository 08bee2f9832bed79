"""Writers to ZooKeeper: membership, leases, the layout; and the embedded ZooKeeper of one machine.

Its first import decides whether the compiled build runs (`cluster.runtime.compiled`): the process that forks others begins here.
"""

import cluster.runtime.compiled  # noqa: F401
