"""The registry as everybody reads it: paths, node data, the one reducer, and the watcher that feeds it."""
