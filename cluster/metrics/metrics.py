"""Metrics of a process: plain numbers that its parts keep anyway, turned into Prometheus's text at a scrape.

A source is a callable that returns a mapping, a dataclass or samples. Its names become `pixiu_<role>_<name>`; a name that ends in
`_total` is a counter, any other a gauge. `{"dropped_records_total{reason}": {"queue": 3}}` gives one sample for each label value.
Histograms have names that all roles share. Every sample has the labels `role` and, if there is one, `partition`.

A page is made in slices, between which the event loop turns: a scrape of thousands of samples delays nothing by a millisecond.

Source: docs/operations.md, "Watching a cluster"; docs/decisions/0199-labels-of-metrics.md.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import math
import platform
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from cluster.core import log
from cluster.core.compiled import BUILD
from cluster.links.api import PeerState
from cluster.links.datagrams.head import DatagramRefusal
from cluster.links.peer.sender import Drop
from cluster.links.stats import COUNT_NAMES, Counts, LinkStats, PeerStats
from cluster.metrics.histogram import SECONDS, Histogram
from pixiu.discovery.paths import NO_PARTITION
from pixiu.ids import EndpointID
from pixiu.version import __version__

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SLICE: Final = 64
"""Samples, or peers, that are visited in one turn of the event loop: some tenths of a millisecond."""
MAX_SAMPLES: Final = 8192
"""Maximum samples of one source in one scrape; the rest is left out and counted."""
MAX_SOURCES: Final = 256
MAX_HISTOGRAMS: Final = 64
MAX_PEERS: Final = 64
"""Peers that are shown separately; all are in the totals."""
MAX_LABEL: Final = 128
"""Maximum characters of a label's value; the rest is cut."""
LAG_WINDOW: Final = 120
"""Measurements of the event loop's lag over which the maximum is kept: one minute at two a second."""

LINK_WAIT: Final = "Time that the first of each batch to a peer has waited in the peer's queue."
REFUSALS: Final = tuple(reason for name, reason in vars(DatagramRefusal).items() if name.isupper())
DROPS: Final = tuple(reason for name, reason in vars(Drop).items() if name.isupper())
"""Reasons that are shown before anything happened: Prometheus sees no increase in a series that begins with it."""

_NAME: Final = re.compile(r"([a-z][a-z0-9_]*)(?:\{([a-z][a-z0-9_]*)\})?\Z")
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Sample(NamedTuple):
    """One number with its labels. `name` without the prefix pixiu_<role>_."""

    name: str
    value: float
    labels: Mapping[str, str] = {}


Source = Callable[[], "Mapping[str, Any] | Iterable[Sample | None] | object"]
"""Argument of `collect_from`: returns a mapping of names to numbers (or to mappings by label value), a dataclass, or samples.
Samples may be made lazily, between turns of the event loop; a None among them is work that made no sample."""


class _Family:
    """The lines of one metric."""

    __slots__ = ("lines",)

    def __init__(self, name: str, kind: str, text: str) -> None:
        self.lines = [f"# HELP {name} {text.translate(_ESCAPES)}", f"# TYPE {name} {kind}"]


class Metrics:
    """The metrics of one process.

    Args:
        role: the process's role.
        partition: the process's partition; negative if its role has none.
    """

    def __init__(self, role: str, partition: int = NO_PARTITION) -> None:
        self.role = role
        self._labels = {"role": role} | ({"partition": str(partition)} if partition >= 0 else {})
        self._sources: list[tuple[str, Source]] = []
        self._slow: list[Callable[[], Mapping[str, float]]] = []
        self._histograms: list[Histogram] = []
        self._lags: deque[float] = deque([0.0], maxlen=LAG_WINDOW)
        self._failures = 0
        self._left_out = 0
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._delays = self.histogram("pixiu_loop_delay_seconds", "Delay of the event loop at a timer, measured twice a second.")

    def collect_from(self, source: Source, prefix: str = "") -> None:
        """Add a source that is called at every scrape; it must be quick and must not wait.

        prefix: prepended to each name of this source, such as "links_". Raises ValueError above 256 sources.
        """
        if len(self._sources) >= MAX_SOURCES:
            raise ValueError(f"at most {MAX_SOURCES} sources of metrics")
        self._sources.append((prefix, source))

    def collect_in_thread(self, source: Callable[[], Mapping[str, float]]) -> None:
        """Add a source that is called in a thread at every scrape, and may wait for the operating system. Raises ValueError
        above 256 sources."""
        if len(self._slow) >= MAX_SOURCES:
            raise ValueError(f"at most {MAX_SOURCES} sources of metrics")
        self._slow.append(source)

    def histogram(self, name: str, text: str, bounds: tuple[float, ...] = SECONDS, **labels: str) -> Histogram:
        """Return a new histogram of this process.

        name: the full name, unit last; the same in all roles. labels: additional ones. Raises ValueError above 64 histograms.
        """
        if len(self._histograms) >= MAX_HISTOGRAMS:
            raise ValueError(f"at most {MAX_HISTOGRAMS} histograms")
        self._histograms.append(Histogram(name, text, bounds, {**self._labels, **labels}))
        return self._histograms[-1]

    def note_loop_lag(self, seconds: float) -> None:
        """Record the delay of a timer in the event loop."""
        self._lags.append(max(seconds, 0.0))
        self._delays.add(seconds)

    @property
    def loop_lag_s(self) -> float:
        """The highest lag of the last minute, seconds."""
        return max(self._lags)

    async def render(self) -> bytes:
        """Render everything in Prometheus's text format. The event loop turns after every source and every 64 samples."""
        # The kernel visits every open file: in a thread, so that a gateway with many clients does not wait for it.
        process, asked = await asyncio.to_thread(self._ask_in_thread)
        families: dict[str, _Family] = {}
        work = 0
        for ends_slice in self._collect(families, asked):
            work += 1
            if ends_slice or work >= SLICE:
                work = 0
                await asyncio.sleep(0)
        parts = [process]
        for family in families.values():
            parts.append("\n".join(family.lines).encode() + b"\n")
            work += len(family.lines)
            if work >= SLICE:
                work = 0
                await asyncio.sleep(0)
        return b"".join(parts)

    def _ask_in_thread(self) -> tuple[bytes, list[Source]]:
        """Return the operating system's part of the page, and the answers of the sources that may wait."""
        asked: list[Source] = []
        for source in self._slow:
            try:
                said = dict(source())
            except Exception as error:  # one broken source must not hide the others
                self._failures += 1
                if log.once_per(60, (log.METRICS_FAILED, source)):
                    log.get_logger().error(log.METRICS_FAILED, source=repr(source), error=repr(error))
            else:
                asked.append(said.copy)
        return generate_latest(self._process), asked

    def _collect(self, families: dict[str, _Family], asked: Iterable[Source]) -> Iterator[bool]:
        """Collect the lines of one scrape, one unit of work at a time. Yields True if the slice should end. A source that fails
        is left out from there on, counted, and logged once a minute."""
        for prefix, source in (*self._sources, *(("", said) for said in asked)):
            try:
                for count, sample in enumerate(_samples(source())):
                    if count >= MAX_SAMPLES:
                        self._left_out += 1
                        break
                    if sample is not None:
                        self._add(families, prefix, sample)
                    yield False
            except Exception as error:  # one broken source must not hide the others
                self._failures += 1
                if log.once_per(60, (log.METRICS_FAILED, prefix)):
                    log.get_logger().error(log.METRICS_FAILED, source=prefix, error=repr(error))
            yield True
        for histogram in self._histograms:
            self._add_histogram(families, histogram)
            yield True
        for sample in (
            Sample("build_info", 1, {"version": __version__, "python": platform.python_version(), "build": BUILD.name}),
            Sample("loop_lag_seconds", self.loop_lag_s),
            Sample("metrics_failures_total", self._failures),
            Sample("metrics_left_out_total", self._left_out),
        ):
            self._add(families, "", sample)

    def _add(self, families: dict[str, _Family], prefix: str, sample: Sample) -> None:
        short = f"{prefix}{sample.name}"
        name = f"pixiu_{self.role}_{short}"
        line = _line(name, {**self._labels, **sample.labels}, float(sample.value))
        family = families.get(name)
        if family is None:
            text = ALERTS.get(short) or f"{self.role} {short.replace('_', ' ')}"
            family = families[name] = _Family(name, "counter" if name.endswith("_total") else "gauge", text)
        family.lines.append(line)

    def _add_histogram(self, families: dict[str, _Family], histogram: Histogram) -> None:
        name, labels = histogram.name, histogram.labels
        family = families.get(name)
        if family is None:
            family = families[name] = _Family(name, "histogram", histogram.text)
        count = 0
        for bound, count in histogram.buckets():
            family.lines.append(_line(f"{name}_bucket", {**labels, "le": _number(bound)}, count))
        family.lines.append(_line(f"{name}_sum", labels, histogram.total))
        family.lines.append(_line(f"{name}_count", labels, count))


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    said = ",".join([f'{key}="{text[:MAX_LABEL].translate(_ESCAPES)}"' for key, text in labels.items()])
    return f"{name}{{{said}}} {_number(value)}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


def _samples(found: Any) -> Iterator[Sample | None]:
    """Convert a source's result to samples. Raises ValueError for an invalid name."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        found = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    given = _of_mapping(found) if isinstance(found, Mapping) else found
    for sample in given:
        if sample is not None and (not _NAME.match(sample.name) or "{" in sample.name):
            raise ValueError(f"{sample.name!r} is not the name of a metric")
        yield sample


def _of_mapping(found: Mapping[str, Any]) -> Iterator[Sample]:
    # Copies: the event loop turns between samples, and a source may return an object that it keeps changing.
    for key, value in list(found.items()):
        match = _NAME.match(key)
        if match is None:
            raise ValueError(f"{key!r} is not the name of a metric")
        name, label = match.groups()
        if isinstance(value, Mapping):
            for label_value, number in list(value.items()):
                yield Sample(name, number, {label or "kind": log.escape(str(label_value))})
        else:
            yield Sample(name, value)


def link_samples(
    stats: LinkStats, peers: Iterable[tuple[EndpointID, PeerStats]], name_of: Callable[[EndpointID], str]
) -> Iterator[Sample | None]:
    """Return the links' counters as samples: totals, and by peer for the 64 peers with the lowest endpoints.

    stats: without its peers; `peers`: these, one by one, so that many are visited in slices. name_of: the label of a peer,
    role:host:port.
    """
    total = Counts()
    total.add(stats.total)
    states = dict.fromkeys((state.value for state in PeerState), 0)
    known: list[tuple[EndpointID, PeerStats]] = []
    for endpoint, peer in peers:
        total.add(peer.counts)
        states[peer.state.value] += 1
        known.append((endpoint, peer))
        yield None
    yield from _counts("links_", total, {})
    for what, reasons in (
        ("links_refused_total", {**dict.fromkeys(REFUSALS, 0), **stats.refused}),
        ("links_dropped_total", {**dict.fromkeys(DROPS, 0), **stats.dropped}),
        ("links_send_errors_total", stats.send_errors),
        ("links_receive_errors_total", stats.receive_errors),
    ):
        for reason, count in reasons.items():
            yield Sample(what, count, {"reason": log.escape(reason)})
    yield Sample("links_items_given_up_total", stats.items_given_up)
    yield Sample("links_kernel_drops_total", stats.kernel_drops)
    yield Sample("links_receive_buffer_bytes", stats.receive_buffer_bytes)
    for state, count in states.items():
        yield Sample(f"peers_{state}", count)
    for endpoint, peer in heapq.nsmallest(MAX_PEERS, known, key=lambda one: one[0]):
        labels = {"peer": log.escape(name_of(endpoint))}
        yield from _counts("peer_", peer.counts, labels)
        yield Sample("peer_round_trip_seconds", peer.rtt_us / 1e6, labels)
        yield Sample("peer_window_bytes", peer.window_bytes, labels)
        yield Sample("peer_in_flight_bytes", peer.in_flight_bytes, labels)
        yield Sample("peer_queued_bytes", peer.queued_bytes, labels)
        yield Sample("peer_up", int(peer.state is not PeerState.DEAD), labels)


def _counts(prefix: str, counts: Counts, labels: Mapping[str, str]) -> Iterator[Sample]:
    for name in COUNT_NAMES:
        # A late arrival is subtracted from `lost` again, so it is no counter.
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
    "links_items_given_up_total": (
        "Items of several datagrams of which some came and the rest did not. Growing: the network loses datagrams, or this process "
        "does (links_kernel_drops_total)."
    ),
    "links_refused_total": (
        "Datagrams and frames that were refused, by reason. A wrong tag: the sender has another key_dir, or does not belong to "
        "this cluster."
    ),
    "view_nodes": (
        "Processes in this process's view of the registry. A sudden fall on one process only: it is cut off from ZooKeeper."
    ),
    "view_failures_total": "Views that the role could not take over. Any increase is a bug: report the line view_failed.",
    "handler_failures_total": (
        "Exceptions out of a handler of links, caught and dropped. Any increase is a bug: report the line handler_failed."
    ),
    "metrics_failures_total": "Sources of metrics that failed at a scrape. Any increase is a bug: report the line metrics_failed.",
    "metrics_left_out_total": "Scrapes at which one source had more than 8192 samples; the rest was left out.",
    "loop_errors_total": "Callbacks and tasks that failed without anybody handling it. Any increase is a bug: report the line "
    "loop_error.",
    "grpc_handshakes_failed_total": (
        "TLS handshakes at a gRPC port that failed. Growing: somebody connects with a wrong certificate, or none, or probes the "
        "port; look for processes and clients whose certificates have expired."
    ),
    "registry_connected": (
        "1 while ZooKeeper can be reached. 0 for a minute: nobody can join, leave or be promoted; messages go on. "
        "Look at ZooKeeper and at the network to it."
    ),
    "running": "1 while the process serves. 0 for a minute outside of a restart: look at its log.",
    "view_malformed_total": (
        "Data in the registry that could not be read. Any increase: another version or a foreign program writes there."
    ),
}
"""Metric without its prefix → its meaning and what to do."""
