"""What writes to ZooKeeper: membership, leases, the layout; and the embedded ZooKeeper of one machine."""
