"""An index of the tests by what the articles of docs/sources.md say.

Each section of PiXiu is a file here and says which tests prove which of its sentences. NSQ and Swift are a file each, with a row
for each statement about topics: N1 …, W1 …; numbers that are left out are of what NSQ's article says of other programs. Zhihu's and
Tengruan's long connections share a file: Z1 …, T1 ….

A sentence is a short paraphrase; a test is named as "folder/file::function", without "test_" and ".py".

Where Pixiu departs from a sentence on purpose, the sentence says so in brackets, and its tests prove what is done instead.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent.parent
Sentences = Mapping[str, Sequence[str]]


class Row(NamedTuple):
    """A statement of an article."""

    says: str
    proofs: Sequence[str] = ()
    reason: str = ""
    """Why it, or what part of it, has no test: it is not built, or not as the article has it."""


Rows = Mapping[str, Row]


@cache
def tests_of(file: str) -> frozenset[str]:
    """The names of the test functions in a file; none when there is no such file."""
    folder, _, name = file.rpartition("/")
    path = TESTS / folder / f"test_{name}.py"
    if not path.exists():
        return frozenset()
    functions = ast.parse(path.read_text()).body
    return frozenset(each.name for each in functions if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def missing(proofs: Sequence[str]) -> list[str]:
    """Which of these tests do not exist."""
    named = [(proof, *proof.split("::")) for proof in proofs]
    return [proof for proof, file, test in named if f"test_{test}" not in tests_of(file)]
