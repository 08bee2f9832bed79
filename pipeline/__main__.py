"""`python -m pipeline JOB …`, and what `spark-submit` is given."""

from __future__ import annotations

from pipeline.commands import pipeline

if __name__ == "__main__":
    pipeline()
