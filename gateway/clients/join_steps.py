"""Requests of a connection that are joined in several steps, and answered once, when all of them are. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from gateway import events as ev

FIRST_STEP: Final = 1 << 64
"""First number of a step; no request has such a number."""


@dataclass(slots=True)
class _Request:
    number: int
    left: int
    refused: set[str] = field(default_factory=set)
    user_refused: bool = False


class JoinSteps:
    """The steps of one connection that are not answered yet."""

    __slots__ = ("_next", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, _Request] = {}
        self._next = FIRST_STEP

    def begin(self, request: int, steps: int) -> range | tuple[int]:
        """Numbers by which the steps of a request are answered; a single step has the request's own."""
        if steps == 1:
            return (request,)
        numbers = range(self._next, self._next + steps)
        self._next += steps
        self._waiting.update(dict.fromkeys(numbers, _Request(request, steps)))
        return numbers

    def answered(self, answer: ev.Answer) -> ev.Answer | None:
        """Take the answer to a step. Returns that of its request, with what any step was refused; None: more steps follow."""
        request = self._waiting.pop(answer.request, None)
        if request is None:
            return answer
        request.left -= 1
        request.refused |= answer.refused
        request.user_refused = request.user_refused or answer.user_refused
        if request.left:
            return None
        return ev.Answer(answer.connection, request.number, answer.known, frozenset(request.refused), request.user_refused)
