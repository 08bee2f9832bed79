"""What the jobs share: reading tables, and one sentence for whatever went wrong."""

from __future__ import annotations

import re
from typing import Any, Final

_OURS: Final = re.compile(r"^(?:.*?: )?pixiu\.(?:errors|[\w.]+)\.(\w+): (.+)$", re.MULTILINE)
MAX_SENTENCE: Final = 1000


def read(spark: Any, target: str, **options: object) -> Any:
    """A table of the cluster as a DataFrame, as it is now."""
    reader = spark.read.format("pixiu").option("target", target)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


def sentence_of(error: BaseException) -> str:
    """What an exception says in one sentence: ours, from inside of Spark's, where there is one."""
    text = str(error)
    ours = _OURS.findall(text)
    if ours:
        return str(ours[-1][1]).strip()[:MAX_SENTENCE]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:MAX_SENTENCE]
