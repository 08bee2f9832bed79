"""`python -m pipeline JOB …`, and the script for `spark-submit`."""

from __future__ import annotations

from pipeline.commands import pipeline

if __name__ == "__main__":
    pipeline()
