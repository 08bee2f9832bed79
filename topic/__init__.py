"""The role topic: durable logs of blocks, and the channels that read them. Its first import decides whether the compiled build runs
(`cluster.core.compiled`)."""

import cluster.core.compiled  # noqa: F401
