"""A network for simulations, whose datagrams are lost, repeated and overtaken; what is delivered goes into the trace."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.simulation import Simulation

DELAY_S = (0.001, 0.03)
"""Wide enough that datagrams overtake each other."""


class Network(Simulation):
    """A simulation whose datagrams get lost.

    Args:
        seed: of everything that is random.
        drop: probability that a datagram is lost.
        repeat: that it arrives twice.
    """

    def __init__(self, seed: int, drop: float, repeat: float) -> None:
        super().__init__(seed)
        self.faults = True
        """Whether `chance` may say yes."""
        self.drop, self.repeat = drop, repeat
        self.deliveries = 0

    def chance(self, probability: float) -> bool:
        """Whether something bad happens."""
        return self.faults and self.rng.random() < probability

    def delay(self) -> float:
        """Of one datagram."""
        return self.rng.uniform(*DELAY_S)

    def datagram(self, source: int, target: int, messages: list[bytes], arrive: Callable[[bool], None]) -> bool:
        """Send; `arrive(first)` is called for each copy that arrives. False: it is lost."""
        if self.chance(self.drop):
            return False
        for copy in range(2 if self.chance(self.repeat) else 1):
            self.after(self.delay(), self._arrive, source, target, messages, arrive, copy == 0)
        return True

    def _arrive(self, source: int, target: int, messages: list[bytes], arrive: Callable[[bool], None], first: bool) -> None:
        self.deliveries += 1
        self.note(b"%d %d %d" % (source, target, first), *messages)
        arrive(first)
