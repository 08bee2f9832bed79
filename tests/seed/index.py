"""An index of the tests by the sections of "Implementing a highly available real-time messaging system" (docs/sources.md): each
section is a file here and says which tests prove which of its sentences.

A sentence is a short paraphrase; a test is named as "folder/file::function", without "test_" and ".py".

Where Pixiu departs from a sentence on purpose, the sentence says so in brackets, and its tests prove what is done instead.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
Sentences = Mapping[str, Sequence[str]]


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
