"""The Pi role. Its first import decides whether the compiled build runs (`cluster.runtime.compiled`)."""

import cluster.runtime.compiled  # noqa: F401
