"""Metrics of a process: plain numbers that its parts keep anyway, turned into Prometheus samples when somebody scrapes.

A source is a callable that returns a mapping, a dataclass or samples. Its names become `pixiu_<role>_<name>`; a name that
ends in `_total` is a counter, any other a gauge. `{"dropped_records_total{reason}": {"queue": 3}}` gives one sample for each
label value.

Source: docs/operations.md.
"""

from __future__ import annotations

import dataclasses
import platform
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.links.api import PeerState
from cluster.links.stats import COUNT_NAMES, Counts, LinkStats
from cluster.runtime import log
from pixiu.ids import EndpointID
from pixiu.version import __version__

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_SAMPLES: Final = 8192
"""Samples that one source may give to one scrape; the rest is left out and counted."""
MAX_SOURCES: Final = 256
MAX_PEERS: Final = 256
"""Peers that are shown one by one; all are in the totals."""
MAX_LABEL: Final = 128
"""Characters of a label's value; the rest is cut."""
LAG_WINDOW: Final = 120
"""Turns of the event loop's clock over which the highest lag is kept: one minute at two a second."""

_NAME: Final = re.compile(r"([a-z][a-z0-9_]*)(?:\{([a-z][a-z0-9_]*)\})?\Z")


class Sample(NamedTuple):
    """One number with its labels. `name` without the prefix pixiu_<role>_."""

    name: str
    value: float
    labels: Mapping[str, str] = {}


Source = Callable[[], "Mapping[str, Any] | Iterable[Sample] | object"]
"""What `collect_from` takes: returns a mapping of names to numbers (or to mappings by label value), a dataclass, or samples."""


class Metrics(Collector):
    """The metrics of one process, in a registry of its own."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._sources: list[tuple[str, Source]] = []
        self._lags: deque[float] = deque([0.0], maxlen=LAG_WINDOW)
        self._failures = 0
        self._left_out = 0
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def collect_from(self, source: Source, prefix: str = "") -> None:
        """Ask this callable for its numbers at every scrape; it must be quick and must not wait.

        prefix: put before each name of this source, such as "links_". Raises ValueError above 256 sources.
        """
        if len(self._sources) >= MAX_SOURCES:
            raise ValueError(f"at most {MAX_SOURCES} sources of metrics")
        self._sources.append((prefix, source))

    def note_loop_lag(self, seconds: float) -> None:
        """How late the event loop came to a timer."""
        self._lags.append(max(seconds, 0.0))

    @property
    def loop_lag_s(self) -> float:
        """The highest lag of the last minute, seconds."""
        return max(self._lags)

    def render(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is, is known at the scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape. A source that fails is left out, counted, and logged once a minute."""
        families: dict[str, Metric] = {}
        for prefix, source in self._sources:
            try:
                self._add(families, prefix, list(_samples(source(), MAX_SAMPLES + 1)))
            except Exception as error:  # one broken source must not hide the others
                self._failures += 1
                if log.once_per(60, (log.METRICS_FAILED, prefix)):
                    log.get_logger().error(log.METRICS_FAILED, source=prefix, error=repr(error))
        self._add(
            families,
            "",
            [
                Sample("build_info", 1, {"version": __version__, "python": platform.python_version()}),
                Sample("loop_lag_seconds", self.loop_lag_s),
                Sample("metrics_failures_total", self._failures),
                Sample("metrics_left_out_total", self._left_out),
            ],
        )
        yield from families.values()

    def _add(self, families: dict[str, Metric], prefix: str, samples: list[Sample]) -> None:
        if len(samples) > MAX_SAMPLES:
            self._left_out += 1
            samples = samples[:MAX_SAMPLES]
        for sample in samples:
            name = f"pixiu_{self.role}_{prefix}{sample.name}"
            family = families.get(name)
            if family is None:
                family = families[name] = _family(name, tuple(sample.labels))
            labels = {key: value[:MAX_LABEL] for key, value in sample.labels.items()}
            # A counter's samples carry the name with _total, its family the one without.
            family.add_sample(name, labels, float(sample.value))


def _family(name: str, labels: tuple[str, ...]) -> Metric:
    text = ALERTS.get(_short(name)) or name.removeprefix("pixiu_").replace("_", " ")
    if name.endswith("_total"):
        return CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
    return GaugeMetricFamily(name, text, labels=labels)


def _short(name: str) -> str:
    """The name without pixiu_<role>_, as ALERTS has it."""
    return name.split("_", 2)[2]


def _samples(found: Any, limit: int) -> Iterator[Sample]:
    """What a source returned, as samples, at most `limit`. Raises ValueError on a name that is none."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        found = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    given = _of_mapping(found) if isinstance(found, Mapping) else found
    for count, sample in enumerate(given):
        if count >= limit:
            return
        if not _NAME.match(sample.name) or "{" in sample.name:
            raise ValueError(f"{sample.name!r} is no name of a metric")
        yield sample


def _of_mapping(found: Mapping[str, Any]) -> Iterator[Sample]:
    for key, value in found.items():
        match = _NAME.match(key)
        if match is None:
            raise ValueError(f"{key!r} is no name of a metric")
        name, label = match.groups()
        if isinstance(value, Mapping):
            for label_value, number in value.items():
                yield Sample(name, number, {label or "kind": log.escape(str(label_value))})
        else:
            yield Sample(name, value)


def link_samples(stats: LinkStats, name_of: Callable[[EndpointID], str]) -> Iterator[Sample]:
    """What links have counted, as samples: totals, and by peer for the first 256 peers in the order of their names.

    name_of: the label of a peer, role:host:port.
    """
    yield from _counts("links_", stats.total, {})
    for what, reasons in (
        ("links_refused_total", stats.refused),
        ("links_dropped_total", stats.dropped),
        ("links_send_errors_total", stats.send_errors),
        ("links_receive_errors_total", stats.receive_errors),
    ):
        for reason, count in reasons.items():
            yield Sample(what, count, {"reason": log.escape(reason)})
    yield Sample("links_kernel_drops_total", stats.kernel_drops)
    yield Sample("links_receive_buffer_bytes", stats.receive_buffer_bytes)
    named = sorted((log.escape(name_of(endpoint)), endpoint) for endpoint in stats.peers)
    states = dict.fromkeys((state.value for state in PeerState), 0)
    for peer in stats.peers.values():
        states[peer.state.value] += 1
    for state, count in states.items():
        yield Sample(f"peers_{state}", count)
    for name, endpoint in named[:MAX_PEERS]:
        peer, labels = stats.peers[endpoint], {"peer": name}
        yield from _counts("peer_", peer.counts, labels)
        yield Sample("peer_round_trip_seconds", peer.rtt_us / 1e6, labels)
        yield Sample("peer_window_bytes", peer.window_bytes, labels)
        yield Sample("peer_in_flight_bytes", peer.in_flight_bytes, labels)
        yield Sample("peer_queued_bytes", peer.queued_bytes, labels)
        yield Sample("peer_up", int(peer.state is not PeerState.DEAD), labels)


def _counts(prefix: str, counts: Counts, labels: Mapping[str, str]) -> Iterator[Sample]:
    for name in COUNT_NAMES:
        # What arrives late is taken off `lost` again, so it is no counter.
        yield Sample(f"{prefix}lost_items" if name == "lost" else f"{prefix}{name}_total", getattr(counts, name), labels)


ALERTS: Final[Mapping[str, str]] = {
    "loop_lag_seconds": (
        "Highest delay of the event loop in the last minute. Above 0.25 for minutes: the process is short of CPU; "
        "start another replica or move it to a machine with a free core."
    ),
    "watchdog_stalls_total": (
        "Times the event loop stood still for half the session timeout and the process gave up its place in the registry. "
        "Any increase: look for loop_stalled in the log, for swapping and for a stopped machine."
    ),
    "peers_dead": (
        "Peers in the registry that no longer answer heartbeats. Above 0 for a minute: the network between two machines is cut, "
        "or a process hangs; look at /health of the peer and at firewalls for UDP on its port."
    ),
    "links_kernel_drops_total": (
        "Datagrams that the kernel dropped because the process did not read fast enough. Growing: it is short of CPU, or the "
        "kernel gave less socket buffer than asked (links_receive_buffer_bytes): raise net.core.rmem_max."
    ),
    "links_dropped_total": (
        "Records and control messages dropped before they were sent, by reason. Growing for one peer (peer_queue_drops_total): "
        "that peer is too slow or gone."
    ),
    "links_refused_total": (
        "Datagrams and frames that came in and were not taken, by reason. A wrong tag: somebody has another secret_file, or is "
        "not of this cluster."
    ),
    "view_nodes": (
        "Processes in this process's view of the registry. A sudden fall on one process only: it is cut off from ZooKeeper."
    ),
    "view_failures_total": "Views that the role could not take over. Any increase is a bug: report the line view_failed.",
    "handler_failures_total": (
        "Exceptions out of a handler of links, caught and dropped. Any increase is a bug: report the line handler_failed."
    ),
    "metrics_failures_total": "Sources of metrics that failed at a scrape. Any increase is a bug: report the line metrics_failed.",
    "metrics_left_out_total": "Scrapes at which one source had more than 8192 samples; what was above is not shown.",
    "loop_errors_total": "Callbacks and tasks that failed unseen. Any increase is a bug: report the line loop_error.",
    "registry_connected": (
        "1 while ZooKeeper can be reached. 0 for a minute: nobody can join, leave or be promoted; messages go on. "
        "Look at ZooKeeper and at the network to it."
    ),
    "running": "1 while the process serves. 0 for a minute outside of a restart: look at its log.",
    "view_malformed_total": (
        "Data in the registry that could not be read. Any increase: another version or a foreign program writes there."
    ),
}
"""Metric without its prefix → what it says and what to do."""
