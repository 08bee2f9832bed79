"""The base of the service of a role with a replicated log: leadership, proposals and refusals between its core and its replica.

    core ── Propose ──▶ StoreShell ──▶ Replica ── LeaderChanged, Accepted, Refused, Persisted ──▶ core

Source: docs/replication.md, "Use by a role".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.core.role import RoleShell
from cluster.core.runner import Runner
from cluster.process.context import Context
from cluster.replication.core.events import Persisted
from cluster.replication.machine import StateMachine
from cluster.replication.replica import Replica
from cluster.replication.role_options import ReplicatedOptions
from cluster.store.events import LeaderChanged, Propose, Refused
from pixiu.errors import PixiuError, Refusal


class StoreShell(RoleShell):
    """Runs one core over a replica.

    Args:
        context: of the process; the role's options are `ReplicatedOptions`.
        machine: the role's state.
        runner: of the core. Its events include those of `cluster.store.events`, its effects `Propose`.
        has_space: returns whether the role has space to lead.
    """

    _runner: Runner[Any, Any]

    def __init__(
        self, context: Context[Any], machine: StateMachine, runner: Runner[Any, Any], has_space: Callable[[], bool]
    ) -> None:
        super().__init__(context.crash)
        options: ReplicatedOptions = context.options
        self._runner = self.run(runner)
        self._epoch = 0
        """Epoch in which the core leads; 0: it does not."""
        runner.effects.on(Propose, self._propose)
        self._replica = Replica(
            context, machine, Path(options.data_dir) / "replica", options.replication(),
            on_leader=self._leader_changed,
            on_persisted=lambda counter: runner.step(Persisted(counter)),
            on_applied=self._applied,
            has_space=has_space,
            segment_bytes=options.segment_mb << 20,
        )  # fmt: skip

    def _leader_changed(self, epoch: int) -> None:
        self._epoch = epoch
        self._runner.step(LeaderChanged(epoch, "" if epoch else self._replica.leader_address))

    def _note_leader(self) -> None:
        """Report the leader's address to a core that does not lead and is about to refuse a request."""
        if not self._epoch:
            self._runner.step(LeaderChanged(0, self._replica.leader_address))

    def _applied(self, first: int, answers: Sequence[object], copies: int) -> None:
        """Take the state machine's answers. A role whose core applies the entries needs none."""

    def _check(self, effect: Propose) -> None:
        """Raise the role's own reason to refuse an entry; by default there is none."""

    def _propose(self, effect: Propose) -> None:
        try:
            self._check(effect)
            accepted = self._replica.append(effect.payloads, token=effect.token, replicated=effect.replicated)
        except PixiuError as error:
            self._runner.step(Refused(effect.token, Refusal.of(error)))
        else:
            self._runner.step(accepted)
