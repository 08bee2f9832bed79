"""Durable topics beside other logs: the load, and the protocols that it speaks."""
