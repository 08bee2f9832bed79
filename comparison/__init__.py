"""`pixiu bench --peers`: our cluster and other installed message servers, in turn, on the same work.

Source: docs/performance.md, docs/decisions/0271-the-comparison-is-a-package-beside-the-servers.md.
"""
