"""The bridge. Its first import decides whether the compiled build runs (`cluster.core.compiled`)."""

import cluster.core.compiled  # noqa: F401
