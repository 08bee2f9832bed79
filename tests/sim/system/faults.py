"""What is built into a whole system: production cores, and the faults that a test can put in the place of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import broker.core
import cluster.replication.core.core
import gateway.core
import gateway.events as ge
import pi.core
import proxy.mail.pipeline
import relay.core
import router.core
import xiu.core
from cluster.core.contract import SendControl
from cluster.membership.events import ClusterChanged, MessagesReceived, Replica
from cluster.membership.events import Effect as ReplicaEffect
from cluster.membership.member.core import MemberCore
from cluster.replication.model import START
from cluster.store.doubling.copied import Record, rows_body, rows_of
from cluster.store.doubling.learning import Lesson
from cluster.store.doubling.phases import Phase as StorePhase
from cluster.store.doubling.steps import Act, Standing, steps_to
from cluster.wire.v1.doubling_pb2 import DOUBLING_SPLIT, DoublingAdvanceRequest
from ops.doubling.doubling import Action, Advance, Commit, Phase, Seen, decide
from pi.doubling import PiCopying
from pi.serving import Serving
from pi.state import State
from pixiu.placement.partition import serves
from pixiu.wire.inbox_operations import Writer
from proxy.mail.batches import Batch
from proxy.mail.requests import Link, Request
from proxy.mail_events import Effect as MailEffect
from proxy.mail_events import Result, Store
from relay.delivery.session import Session
from relay.delivery.sessions import Deliveries
from relay.mail.core import MailCore
from relay.mail.devices import MailDevices
from tests.sim.cluster.faults import Variant


def as_decided(acts: tuple[Act, ...]) -> tuple[Act, ...]:
    """No fault."""
    return acts


@dataclass(frozen=True)
class SystemVariant(Variant):
    """The production cores, unless a test says otherwise."""

    replication: type[cluster.replication.core.core.Core] = cluster.replication.core.core.Core
    state: type[State] = State
    pi: type[pi.core.Core] = pi.core.Core
    xiu: type[xiu.core.Core] = xiu.core.Core
    lesson: type[Lesson] = Lesson
    acts: Callable[[tuple[Act, ...]], tuple[Act, ...]] = as_decided
    """In which order a leader of Pi takes an operator's steps."""
    steps: Callable[[Standing, DoublingAdvanceRequest], tuple[Act, ...]] = steps_to
    """Which steps a leader of Pi takes to a phase."""
    decide: Callable[[Seen], tuple[Phase, Action]] = decide
    """What the operator's tool does next."""
    mail: type[proxy.mail.pipeline.MailCore] = proxy.mail.pipeline.MailCore
    mail_devices: type[MailDevices] = MailDevices
    deliveries: type[Deliveries] = Deliveries
    relay_mail: type[MailCore] = MailCore
    session: type[Session] = Session


class ConfirmsWhatIsStored(proxy.mail.pipeline.MailCore):
    """Fault: mail is confirmed when Xiu has it; Pi may have it a moment later, or never."""

    def _release(self, batch: Batch, out: list[MailEffect]) -> None:
        super()._release(batch, out)
        stored = [index for index in range(batch.count) if index not in batch.codes]
        results = [Result(batch.positions[index], 1, batch.copies, (batch.msg_ids[index],)) for index in stored]
        self._answer(batch.writer, results, Store(False, batch.partition))


class TellsCopiesOfPi(proxy.mail.pipeline.MailCore):
    """Fault: a confirmation says on how many disks Pi has the mail, however few of Xiu's do."""

    def _stored(
        self, link: Link[Batch], request: Request[Batch], copies: int, now: float, out: list[MailEffect]
    ) -> bool:  # fmt: skip
        return super()._stored(link, request, 1 << 20, now, out)


class DropsRedeliveries(gateway.core.Core):
    """Fault: mail that is marked as sent before is not written to the client."""

    def step(self, event: object, now: float) -> list[ge.Effect]:
        """Without what is marked."""
        if isinstance(event, ge.MailArrived):
            event = replace(event, runs=[run for run in event.runs if not run.redelivered])
        return super().step(event, now)


class OwnsEverybody(MailDevices):
    """Fault: every relay of a partition takes itself for the owner of all its users."""

    def owns(self, uin: int) -> bool:
        """Whoever it is."""
        return self._endpoint in self._owners and uin % self._partitions == self._partition


class OneSession(State):
    """Fault: Pi gives a device the session number that it has: nobody is fenced."""

    def _open_session(self, uin: int, number: int) -> int:
        device = self.inboxes.user(uin).devices.get(number)
        return device.session if device is not None and device.session else super()._open_session(uin, number)


class ConfirmsUnheard(router.core.Core):
    """Fault: what a gateway says is confirmed, and neither kept nor passed on."""

    def _take(self, event: MessagesReceived, sender: Replica | None, now: float, effects: list[ReplicaEffect]) -> None:
        if sender is not None:
            super()._take(event, sender, now, effects)
        else:
            effects.append(SendControl(event.peer, [self._confirmation([message.id for message in event.messages])]))


class ServesWhatMoves(Serving):
    """Fault: a parent that is split goes on to serve what moves."""

    def _serve(self) -> None:
        super()._serve()
        if self._record.phase in (StorePhase.SPLIT, StorePhase.CLEANING) or self._appended:
            self.partitions = self._layout


class WritesTwice(pi.core.Core):
    """Fault: the same, of a Pi."""

    def __init__(self, *, partition: int, **others: Any) -> None:
        super().__init__(partition=partition, **others)
        self._serving = ServesWhatMoves(partition)


class TellsTheTail(Lesson):
    """Fault: a parent tells its child what is in its log, committed or not."""

    def may_tell(self, applied: int) -> int:
        """All there is."""
        return self._log.last.counter


def split_first(acts: tuple[Act, ...]) -> tuple[Act, ...]:
    """Fault: SPLIT overtakes what came in the same turn."""
    return acts[::-1]


def cleans_early(now: Standing, request: DoublingAdvanceRequest) -> tuple[Act, ...]:
    """Fault: what moved is deleted whatever the layout's number is."""
    return steps_to(now._replace(layout=replace(now.layout, n=now.layout.next)), request)


class ForgetsRefusals(pi.core.Core):
    """Fault: Pi does not remember whose appends it refused: what came behind them is taken."""

    def _end_writers(self, stream: int, writers: list[Writer]) -> None:
        """Nothing is noted."""


class _OpensEarly(PiCopying):
    @property
    def whole(self) -> bool:
        """Already when there is something."""
        return self.learning and self.record.learned != START


class OpensEarly(State):
    """Fault: a child opens before it has learned what its parent took up to the cut."""

    copying_type = _OpensEarly


class _LearnsNoCursors(PiCopying):
    def _take_rows(self, record: Record, body: bytes) -> Record | None:
        last, rows = rows_of(body)
        return super()._take_rows(record, rows_body(record.source, [row for row in rows if row[0][:1] != b"C"], last=last))


class LearnsNoCursors(State):
    """Fault: a child learns its parent's inboxes and devices, and not what they have acknowledged."""

    copying_type = _LearnsNoCursors


class FollowsNoCursors(State):
    """Fault: a child follows what its parent appends, and not what is acknowledged meanwhile: sessions there go on with the cursors
    that the parent had when the child began to learn."""

    def _acknowledge(self, uin: int, number: int, lane: int, session: int, up_to: int, bits: int) -> int:
        return 0 if self.copying.learning else super()._acknowledge(uin, number, lane, session, up_to, bits)


def flips_early(seen: Seen) -> tuple[Phase, Action]:
    """Fault: the layout gets its new number as soon as the new partitions have been told to learn, or to start."""
    phase, action = decide(seen)
    splits = isinstance(action, Advance) and action.phase == DOUBLING_SPLIT
    return (Phase.COMMIT, Commit()) if splits or phase is Phase.START else (phase, action)


class _Purging(MemberCore):
    """What moved is dropped when the layout has its new number; whoever sends to it by the old one is taken for right."""

    _before = 0
    _purge_at: float

    def _on_cluster(self, event: ClusterChanged, now: float, out: list[ReplicaEffect]) -> None:
        if self._view is not None and event.partitions > self._partitions:
            self._before = self._partitions
        super()._on_cluster(event, now, out)
        if self._before:
            self._purge_at = min(self._purge_at, now)

    def _serves(self, group: int) -> bool:
        return serves(self.partition, group, self._before or self._partitions)


class BrokerPurgesAtTheFlip(_Purging, broker.core.Core):
    """Fault: what moved is dropped at the flip, and not passed on."""


class RelayPurgesAtTheFlip(_Purging, relay.core.Core):
    """Fault: the same of a relay."""
