"""The registry as all processes read it: paths, node data, the one reducer, and the watcher that feeds it."""
