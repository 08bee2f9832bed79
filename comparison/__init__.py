"""`pixiu bench --peers`: our cluster and other installed message servers, in turn, on the same work.

Source: docs/performance.md, "Beside others".
"""
