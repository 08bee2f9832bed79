"""Pixiu: a distributed, partitioned publish/subscribe cluster."""
