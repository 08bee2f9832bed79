"""Marks of load tests: senders set them, receivers choose what comes, and what a handler sends has the mark of what it handles.

Source: docs/sdk.md, "Load tests".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal

from pixiu.errors import InvalidArgument

LoadTest = Literal["block", "pass", "only"]
"""Treatment of marked messages: they do not come, they come as all others, or nothing else comes."""
LOAD_TESTS: Final = ("block", "pass", "only")
_handling: Final = ContextVar("pixiu_load_test", default=False)


def check_load_test(load_test: str) -> str:
    """Check a treatment. Raises `InvalidArgument`."""
    if load_test not in LOAD_TESTS:
        raise InvalidArgument(f"load_test is one of {', '.join(LOAD_TESTS)}, not {load_test!r}")
    return load_test


def passes(load_test: str, *, marked: bool) -> bool:
    """True if a message comes."""
    return load_test == "pass" or marked is (load_test == "only")


def mark_of(wanted: bool | None) -> bool:
    """The mark of a message to be sent: as wanted; without a wish that of the message that is being handled."""
    if wanted is None:
        return _handling.get()
    if not isinstance(wanted, bool):
        raise InvalidArgument(f"load_test of a message is True or False, not {wanted!r}")
    return wanted


@contextmanager
def handling(*, marked: bool) -> Iterator[None]:
    """Have everything that is sent meanwhile, by tasks and threads that begin here, too, inherit the mark of a message."""
    token = _handling.set(marked)
    try:
        yield
    finally:
        _handling.reset(token)
