"""Judges a load: the cause of each missing delivery, and broken promises of docs/promises.md. Pure.

    missing delivery
      ├── refused           reported to the publisher
      ├── unacknowledged    sent before a death and not accepted by then
      ├── between           sent between a death and the rejoin
      ├── in_flight         owed to a user of a gateway that died before writing it out
      ├── link_gap          as many records as the links counted as lost on that hop
      └── unexplained       a broken promise

    Of mail a refusal, or a missing acceptance, is the only explanation: what was accepted arrives, whoever dies.

Source: docs/promises.md, docs/links.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from pixiu.ids import UIN
from tools.load.ledger import NOT_YET, Judgement, Ledger, Missing

IN_FLIGHT_US: Final = 5_000_000
"""Time before a gateway's death in which an accepted message may still have been inside it, microseconds."""
MAX_EXAMPLES: Final = 20
"""Limit of unexplained losses that a report lists."""


COUNTS: Final = (
    "sent", "confirmed", "expected", "delivered", "lost", "repeated", "out_of_order", "alien", "damaged", "early", "foreign",
    "refused", "refusals", "unacknowledged", "failed_logins", "unread", "gaps",
)  # fmt: skip
"""Fields of a verdict that its JSON has unchanged."""


class Cause(Enum):
    """The cause of a missing delivery."""

    REFUSED = "refused"
    UNACKNOWLEDGED = "unacknowledged"
    BETWEEN = "between"
    IN_FLIGHT = "in_flight"
    LINK_GAP = "link_gap"
    UNEXPLAINED = "unexplained"


@dataclass(slots=True)
class Death:
    """A process that ended unexpectedly, and the time at which its place was filled again."""

    name: str
    """Name for people: role, partition and replica."""
    role: str
    partition: int
    endpoint: int
    death_us: int
    rejoin_us: int | None = None
    """Time at which the role and partition had all its Running replicas again; None: never in this replay."""
    users: frozenset[UIN] = frozenset()
    """Users who were connected to it (gateways)."""
    counts: Counter[str] = field(default_factory=Counter)
    """Missing deliveries by cause."""


@dataclass(frozen=True, slots=True)
class Hop:
    """Counters of the links of one kind of hop during the replay."""

    sender: str
    receiver: str
    sent: int
    received: int
    lost: int
    """Gaps in the receivers' sequences, and drops of the senders' queues."""


def cause_of(missing: Missing, deaths: Sequence[Death], *, mail: bool = False) -> tuple[Cause, Death | None]:
    """Find the cause of one missing delivery, and the death that explains it. Link gaps are judged afterwards."""
    if mail and not missing.refused and missing.acknowledged_us == NOT_YET:
        return Cause.UNACKNOWLEDGED, None
    for death in deaths:
        concerns_subscriber = not death.users or missing.uin in death.users
        if not concerns_subscriber and missing.sender not in death.users:
            continue
        if missing.sent_us >= death.death_us:
            if death.rejoin_us is None or missing.sent_us <= death.rejoin_us:
                return Cause.BETWEEN, death
            continue
        if missing.refused:
            pending = missing.sent_us >= death.death_us - IN_FLIGHT_US
        else:
            pending = missing.acknowledged_us == NOT_YET or missing.acknowledged_us >= death.death_us
        if pending:
            return Cause.UNACKNOWLEDGED, death
        if death.users and concerns_subscriber and missing.acknowledged_us >= death.death_us - IN_FLIGHT_US:
            return Cause.IN_FLIGHT, death
    return (Cause.REFUSED if missing.refused else Cause.UNEXPLAINED), None


def implied_losses(unexplained: Iterable[Missing], gateway_of: Callable[[UIN], int]) -> tuple[int, int]:
    """Compute the fewest lost records on links that explain these missing deliveries: (before the broker, from brokers on).

    A message that nobody got was one record before the broker; otherwise it was one record for each gateway
    with a user that missed it.
    """
    upstream: set[int] = set()
    downstream: set[tuple[int, int]] = set()
    for missing in unexplained:
        if missing.whole:
            upstream.add(missing.number)
        else:
            downstream.add((missing.number, gateway_of(missing.uin)))
    return len(upstream), len(downstream)


@dataclass(slots=True)
class Verdict:
    """The result of a load; `broken` describes every broken promise."""

    sent: int = 0
    confirmed: int = 0
    """Messages whose acceptance was reported to their publisher."""
    expected: int = 0
    delivered: int = 0
    lost: int = 0
    repeated: int = 0
    """Marked as redelivered or not."""
    out_of_order: int = 0
    alien: int = 0
    damaged: int = 0
    early: int = 0
    foreign: int = 0
    """Of another load: they were in the inbox before."""
    refused: int = 0
    """Messages whose publisher got an error."""
    refusals: dict[str, int] = field(default_factory=dict)
    unacknowledged: int = 0
    """Messages whose publisher got neither acceptance nor an error."""
    failed_logins: int = 0
    unread: int = 0
    """Number of mails that Pi counts as not acknowledged by the load's devices, at the end."""
    gaps: int = 0
    """Gaps that receivers of mail were notified of."""
    causes: dict[str, int] = field(default_factory=dict)
    latency_p50_ms: float = 0.0
    latency_p99_ms: float = 0.0
    latency_max_ms: float = 0.0
    hops: list[Hop] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: every promise kept; 1: one is broken."""
        return 1 if self.broken else 0


def _explain_by_gaps(
    unexplained: Sequence[Missing], hops: Sequence[Hop], gateway_of: Callable[[UIN], int]
) -> tuple[list[Missing], list[Missing]]:
    """Divide into (lost on links that counted it, still unexplained)."""
    upstream, downstream = implied_losses(unexplained, gateway_of)
    lost_up = sum(hop.lost for hop in hops if hop.receiver in ("broker", "proxy", "relay"))
    lost_down = sum(hop.lost for hop in hops if hop.sender in ("broker", "relay"))
    # A message that nobody got may also have lost its only copies after the broker.
    up_counted = upstream <= lost_up + max(lost_down - downstream, 0)
    down_counted = downstream <= lost_down
    counted = [missing for missing in unexplained if (up_counted if missing.whole else down_counted)]
    rest = [missing for missing in unexplained if not (up_counted if missing.whole else down_counted)]
    return counted, rest


def judge(
    ledger: Ledger,
    deaths: Sequence[Death] = (),
    hops: Sequence[Hop] = (),
    *,
    mail: bool = False,
    failed_logins: int = 0,
    unread: int = 0,
    gaps: int = 0,
    gateway_of: Callable[[UIN], int] = lambda _uin: 0,
    names: Callable[[Missing], str] = lambda missing: f"message {missing.number} to {missing.uin}",
) -> Verdict:
    """Judge a finished load. `mail`: it sent mail alone, which is durable."""
    outcomes = ledger.outcomes
    verdict = Verdict(
        sent=ledger.sent,
        confirmed=ledger.confirmed,
        expected=ledger.expected,
        delivered=ledger.delivered,
        lost=ledger.lost,
        repeated=outcomes[Judgement.REPEATED] + outcomes[Judgement.AGAIN],
        out_of_order=outcomes[Judgement.OUT_OF_ORDER],
        alien=outcomes[Judgement.ALIEN],
        damaged=outcomes[Judgement.DAMAGED],
        early=outcomes[Judgement.EARLY],
        foreign=outcomes[Judgement.FOREIGN],
        refused=sum(ledger.refusals.values()),
        refusals=dict(sorted(ledger.refusals.items())),
        unacknowledged=ledger.unacknowledged,
        failed_logins=failed_logins,
        unread=unread,
        gaps=gaps,
        latency_p50_ms=ledger.latency_us.percentile(50) / 1000,
        latency_p99_ms=ledger.latency_us.percentile(99) / 1000,
        latency_max_ms=ledger.latency_us.highest / 1000,
        hops=list(hops),
        deaths=list(deaths),
    )
    causes: Counter[Cause] = Counter()
    unexplained: list[Missing] = []
    for missing in ledger.missing():
        cause, death = cause_of(missing, () if mail else deaths, mail=mail)
        if cause is Cause.UNEXPLAINED:
            unexplained.append(missing)
            continue
        causes[cause] += 1
        if death is not None:
            death.counts[cause.value] += 1
    counted, rest = _explain_by_gaps(unexplained, hops, gateway_of)
    causes[Cause.LINK_GAP] = len(counted)
    causes[Cause.UNEXPLAINED] = len(rest)
    verdict.causes = {cause.value: causes[cause] for cause in Cause}
    verdict.examples = [names(missing) for missing in rest[:MAX_EXAMPLES]] + ledger.examples
    verdict.broken = _broken(verdict, len(rest), mail=mail)
    return verdict


def _broken(verdict: Verdict, unexplained: int, *, mail: bool) -> list[str]:
    lost = "were accepted and have not arrived" if mail else "are lost without a death, a refusal or a counted gap that explains it"
    found: list[str] = []
    for count, text in (
        (unexplained, f"deliveries {lost}"),
        # A process may die between two acknowledgements of mail, which is then delivered again.
        (0 if mail and verdict.deaths else verdict.repeated, "deliveries came more than once"),
        (verdict.out_of_order, "deliveries came after a later message of the same sender and room"),
        (verdict.alien, "deliveries went to somebody who was not a member, or whose inbox it was not"),
        (verdict.damaged, "deliveries had another content than what was sent"),
        (verdict.gaps, "gaps were reported, though nothing was to be dropped"),
        (verdict.unread, "mails are unread in Pi, though their receivers acknowledged them all"),
        (0 if verdict.deaths else verdict.unacknowledged, "messages got neither an acceptance nor an error"),
        (0 if verdict.deaths else verdict.failed_logins, "logins were not confirmed"),
    ):
        if count:
            found.append(f"{count} {text}")
    return found


def verdict_json(verdict: Verdict, extra: Mapping[str, object] | None = None, *, start_us: int = 0) -> dict[str, object]:
    """The verdict as JSON values: latencies in milliseconds, times of deaths in seconds since `start_us`."""
    explained = sum(count for cause, count in verdict.causes.items() if cause != Cause.UNEXPLAINED.value)
    return {
        **(extra or {}),
        **{name: getattr(verdict, name) for name in COUNTS},
        "explained": explained,
        "unexplained": verdict.causes.get(Cause.UNEXPLAINED.value, 0),
        "causes": verdict.causes,
        "latency_ms": {"p50": verdict.latency_p50_ms, "p99": verdict.latency_p99_ms, "max": verdict.latency_max_ms},
        "per_hop": [
            {"from": hop.sender, "to": hop.receiver, "sent": hop.sent, "received": hop.received, "lost": hop.lost}
            for hop in verdict.hops
        ],
        "deaths": [
            {
                "process": death.name,
                "role": death.role,
                "partition": death.partition,
                "endpoint": f"{death.endpoint:016x}",
                "death_s": (death.death_us - start_us) / 1e6,
                "rejoin_s": None if death.rejoin_us is None else (death.rejoin_us - start_us) / 1e6,
                "missing": dict(sorted(death.counts.items())),
            }
            for death in verdict.deaths
        ],
        "unexplained_examples": verdict.examples,
        "broken": verdict.broken,
        "ok": not verdict.broken,
    }
