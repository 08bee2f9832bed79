"""What only the plain build can do: tests that need it are left out where the compiled one runs."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any, Final

import pytest

from cluster.core.compiled import BUILD, names

COMPILED: Final = BUILD.name == "compiled"

plain_only = pytest.mark.skipif(COMPILED, reason="compiled code has no docstrings of methods, and no subclasses in Python")


def can_be_changed(kind: type[Any]) -> bool:
    """Whether a test may set a name of a class: not where it is compiled."""
    return not COMPILED or kind.__module__ not in names()


STAND_IN: Final = re.compile(r"object expected; got (tests|types|unittest)\.")


def stands_in_for_compiled(error: Exception) -> bool:
    """Whether an error says that a test's class derives from a compiled one, or that its object stands in for one."""
    found = COMPILED and isinstance(error, TypeError)
    return found and ("interpreted classes cannot inherit from compiled" in str(error) or bool(STAND_IN.search(str(error))))


def skip_what_changes_compiled_modules() -> None:
    """Leave out a test that sets a name of a compiled module or class, or a method of its object: constants are inlined there, and
    functions called directly."""
    if not COMPILED:
        return
    compiled, setattr_of = frozenset(names()), pytest.MonkeyPatch.setattr

    def checked(self: pytest.MonkeyPatch, target: Any, *rest: Any, **options: Any) -> None:
        if isinstance(target, str):
            module = target.rpartition(".")[0]
        else:
            module = target.__name__ if isinstance(target, ModuleType) else getattr(target, "__module__", "")
        if module in compiled and isinstance(target, str | ModuleType | type):
            pytest.skip(f"{module} is compiled")
        try:
            setattr_of(self, target, *rest, **options)
        except AttributeError as error:
            if module not in compiled:
                raise
            pytest.skip(f"{module} is compiled: {error}")

    pytest.MonkeyPatch.setattr = checked  # type: ignore[method-assign]
