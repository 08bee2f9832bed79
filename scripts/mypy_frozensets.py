"""A mypy plugin that gives the results of set operations on frozensets and dict keys their runtime types.

    frozenset | set, frozenset | frozenset     a frozenset, by frozenset's method
    frozenset | dict.keys()                    a set, by the keys' method: frozenset's takes sets and frozensets only

typeshed has frozenset's method take every `Set`, so the last was a frozenset for mypy. Plain Python does not mind; compiled code
ends with "frozenset object expected; got set". With an error for the first method mypy tries the second, as Python does.

Source: docs/decisions/0234-compiled-or-plain-never-both.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy.plugin import MethodContext, Plugin
from mypy.types import AnyType, Instance, Type, UnionType, get_proper_type

OPERATIONS: Final = {f"builtins.frozenset.__{name}__" for name in ("and", "or", "sub", "xor")}
SETS: Final = ("builtins.frozenset", "builtins.set")


def _is_set(type_: Type) -> bool:
    """Return True if a value of a type is a set or a frozenset, as far as is known."""
    found = get_proper_type(type_)
    if isinstance(found, UnionType):
        return all(_is_set(item) for item in found.items)
    return isinstance(found, AnyType) or (isinstance(found, Instance) and any(map(found.type.has_base, SETS)))


def _checked(context: MethodContext) -> Type:
    """Keep the type; report an error if frozenset's method is not the one that runs."""
    for other in (other for others in context.arg_types for other in others):
        if not _is_set(other):
            context.api.fail("a frozenset takes only sets and frozensets here", context.context)
    return context.default_return_type


class Frozensets(Plugin):
    """Checks every operation whose left side is a frozenset."""

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        """Return the check for those operations."""
        return _checked if fullname in OPERATIONS else None


def plugin(version: str) -> type[Plugin]:
    """Return the plugin. Called by mypy."""
    return Frozensets
