"""One test for many values of the same kind: a case of its own for each costs more than most of them take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Value = TypeVar("Value")


def for_each(name: str, values: Iterable[Value]) -> Callable[[Callable[[Value], None]], Callable[[], None]]:
    """Call a test with every value; a failure says with which one."""

    def decorate(test: Callable[[Value], None]) -> Callable[[], None]:
        def all_of_them() -> None:
            for value in values:
                try:
                    test(value)
                except BaseException as error:
                    error.add_note(f"{name} = {value!r}")
                    raise

        all_of_them.__name__, all_of_them.__module__, all_of_them.__doc__ = test.__name__, test.__module__, test.__doc__
        return all_of_them

    return decorate
