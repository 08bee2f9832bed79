"""The role admin: one of its processes changes topics, the others stand by. Its first import decides whether the compiled build
runs (`cluster.core.compiled`)."""

import cluster.core.compiled  # noqa: F401
