"""The role admin: one of its processes changes topics, the others stand by."""
