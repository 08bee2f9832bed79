"""A cluster on one machine: `pixiu up`, its processes, and the embedded ZooKeeper.

Its first import decides whether the compiled build runs (`cluster.core.compiled`): the process that forks others begins here.
"""

import cluster.core.compiled  # noqa: F401
