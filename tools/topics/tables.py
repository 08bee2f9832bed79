"""Topics, parts and channels as tables and as JSON.

Source: docs/topics.md, "Commands".
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from pixiu.wire.v1 import topic_pb2
from tools.cli.output import visible
from tools.topics.values import duration_text

STATES: Final = {
    topic_pb2.PART_OPEN: "open",
    topic_pb2.PART_SEALED: "sealed",
    topic_pb2.PART_OPENING: "opening",
    topic_pb2.PART_SEALING: "sealing",
}
SHOWN_FILTER: Final = 60
"""Characters of a filter in a table."""
GAPS: Final = "unknown"
"""Text for the size of a part whose leader does not answer."""


@dataclass(frozen=True, slots=True)
class Size:
    """Offsets of a part."""

    first: int
    end: int
    store: topic_pb2.TopicStore | None = None
    """Its storage apart; None: it has none."""


@dataclass(frozen=True, slots=True)
class Lag:
    """A channel in all parts."""

    unacknowledged: int = 0
    with_members: int = 0
    waiting: int = 0
    dead: int = 0
    lost: int = 0
    oldest_us: int = 0
    members: int = 0
    filter_errors: int = 0
    """Messages for which the filter's expression had no value."""

    @property
    def seconds(self) -> float:
        """Age of the oldest message that is not acknowledged."""
        return max(0.0, time.time() - self.oldest_us / 1_000_000) if self.oldest_us else 0.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A topic, and what the leaders of its groups say of it."""

    topic: topic_pb2.TopicDescription
    sizes: dict[int, Size]
    """Number of a part → its offsets."""
    channels: Sequence[topic_pb2.ChannelPart]
    failures: dict[int, str]
    """Group → why it did not answer."""

    def lag(self, channel: str) -> Lag:
        """A channel in all parts that are known."""
        found = [each for each in self.channels if each.channel == channel]
        return Lag(
            sum(each.unacknowledged for each in found),
            sum(each.with_members for each in found),
            sum(each.waiting for each in found),
            sum(each.dead for each in found),
            sum(each.lost for each in found),
            min((each.oldest_us for each in found if each.oldest_us), default=0),
            max((len(each.members) for each in found), default=0),
            sum(each.filter_errors for each in found),
        )

    def stuck(self) -> list[str]:
        """Reasons why messages wait, and groups that do not answer."""
        found: dict[tuple[str, str], list[int]] = {}
        for each in self.channels:
            for why in each.stuck:
                found.setdefault((each.channel, why), []).append(each.part)
        said = (f"{channel}, {numbers_text(parts)}: {why}" for (channel, why), parts in found.items())
        return [
            *said,
            *self._not_stored(),
            *(f"group {group} does not answer: {why}" for group, why in sorted(self.failures.items())),
        ]

    def _not_stored(self) -> list[str]:
        """Parts of which something could not be uploaded."""
        found: dict[str, list[int]] = {}
        for number, size in self.sizes.items():
            if size.store is not None and size.store.problem:
                found.setdefault(size.store.problem, []).append(number)
        waiting = {number: size.store.waiting_bytes for number, size in self.sizes.items() if size.store is not None}
        return [
            f"{numbers_text(parts)}: {sum(waiting[part] for part in parts):,} bytes wait for the object store: {why}"
            for why, parts in found.items()
        ]


def topic_json(topic: topic_pb2.TopicDescription) -> dict[str, Any]:
    """A topic as JSON."""
    return {
        "name": topic.name,
        "topic": topic.topic,
        "version": topic.version,
        "retention_s": topic.settings.retention_s,
        "retention_bytes": topic.settings.retention_bytes,
        "messages_per_s": topic.settings.messages_per_s,
        "bytes_per_s": topic.settings.bytes_per_s,
        "read_messages_per_s": topic.settings.read_messages_per_s,
        "read_bytes_per_s": topic.settings.read_bytes_per_s,
        "retain_acknowledged": topic.settings.retain_acknowledged,
        "compact_s": topic.settings.compact,
        "store": topic.settings.store,
        "deleted_at_ms": topic.deleted_at_ms,
        "parts": [
            {
                "number": part.number,
                "low": part.low,
                "high": part.high,
                "group": part.group,
                "state": STATES.get(part.state, str(part.state)),
                "parents": list(part.parents),
            }
            for part in topic.parts
        ],
        "channels": [channel_json(channel) for channel in topic.channels],
        "groups": {str(group.group): list(group.addresses) for group in topic.groups},
    }


def channel_json(channel: topic_pb2.TopicChannel) -> dict[str, Any]:
    """A channel's settings as JSON."""
    return {
        "name": channel.name,
        "channel": channel.channel,
        "mode": "ordered" if channel.ordered else "any",
        "from_end": channel.from_end,
        "max_attempts": channel.max_attempts,
        "timeout_ms": channel.timeout_ms,
        "filter": channel.filter,
    }


def lag_json(lag: Lag) -> dict[str, Any]:
    """The lag of a channel as JSON."""
    return {
        "unacknowledged": lag.unacknowledged,
        "with_members": lag.with_members,
        "waiting": lag.waiting,
        "dead": lag.dead,
        "lost": lag.lost,
        "oldest_s": round(lag.seconds, 3),
        "members": lag.members,
        "filter_errors": lag.filter_errors,
    }


def shown_json(shown: Shown) -> dict[str, Any]:
    """A topic with sizes and lags, as JSON."""
    found = topic_json(shown.topic)
    for part in found["parts"]:
        size = shown.sizes.get(part["number"])
        part |= {"first": size.first, "end": size.end} if size is not None else {}
        if size is not None and size.store is not None:
            part["store"] = {
                "url": size.store.url,
                "end": size.store.end,
                "waiting_bytes": size.store.waiting_bytes,
                "oldest_s": size.store.oldest_ms / 1000,
                "problem": size.store.problem,
            }
    for channel in found["channels"]:
        channel |= lag_json(shown.lag(channel["name"]))
    return {**found, "problems": shown.stuck()}


def topic_table(topics: Iterable[topic_pb2.TopicDescription]) -> Table:
    """Topics in rows."""
    table = _table("name", "parts:", "sealed:", "channels:", "retention", "version:", "state")
    for topic in topics:
        opened = sum(part.state != topic_pb2.PART_SEALED for part in topic.parts)
        table.add_row(
            escape(topic.name),
            str(opened),
            str(len(topic.parts) - opened),
            str(len(topic.channels)),
            settings_text(topic),
            str(topic.version),
            "in the bin" if topic.deleted_at_ms else "",
        )
    return table


def part_table(shown: Shown) -> Table:
    """Parts in rows."""
    stored = any(size.store is not None for size in shown.sizes.values())
    table = _table(
        "part:", "slots", "group:", "state", "first:", "end:", "after", *(("stored to:", "to upload:") if stored else ())
    )
    for part in shown.topic.parts:
        size = shown.sizes.get(part.number)
        table.add_row(
            str(part.number),
            f"{part.low}-{part.high - 1}",
            str(part.group),
            STATES.get(part.state, str(part.state)),
            f"{size.first:,}" if size is not None else GAPS,
            f"{size.end:,}" if size is not None else GAPS,
            ", ".join(map(str, part.parents)),
            *(_stored(size) if stored else ()),
        )
    return table


def _stored(size: Size | None) -> tuple[str, str]:
    if size is None or size.store is None:
        return "", ""
    age = f" for {duration_text(size.store.oldest_ms, 2)}" if size.store.waiting_bytes else ""
    return f"{size.store.end:,}", f"{size.store.waiting_bytes:,} bytes{age}"


def channel_table(shown: Shown) -> Table:
    """Channels in rows."""
    table = _table("channel", "mode", "lag:", "oldest:", "with members:", "waiting:", "dead:", "lost:", "members:", "filter")
    for channel in shown.topic.channels:
        lag = shown.lag(channel.name)
        table.add_row(
            escape(channel.name),
            "ordered" if channel.ordered else "any",
            f"{lag.unacknowledged:,}",
            duration_text(int(lag.seconds * 1000), 2) if lag.unacknowledged else "",
            f"{lag.with_members:,}",
            f"{lag.waiting:,}",
            f"{lag.dead:,}",
            f"{lag.lost:,}",
            str(lag.members),
            escape(_filter_text(channel.filter)) + (f" ({lag.filter_errors:,} errors)" if lag.filter_errors else ""),
        )
    return table


def _filter_text(text: str) -> str:
    said = visible(text)
    return said if len(said) <= SHOWN_FILTER else f"{said[: SHOWN_FILTER - 1]}…"


def heading(shown: Shown) -> str:
    """A topic in one line."""
    topic = shown.topic
    bin_ = "; in the bin" if topic.deleted_at_ms else ""
    stored = sum(size.end - size.first for size in shown.sizes.values())
    return f"{topic.name}: {parts_text(topic)}, {stored:,} messages; {settings_text(topic)}; version {topic.version}{bin_}"


def parts_text(topic: topic_pb2.TopicDescription) -> str:
    """The number of parts in words."""
    opened = sum(part.state != topic_pb2.PART_SEALED for part in topic.parts)
    groups = len({part.group for part in topic.parts})
    sealed = f" ({len(topic.parts) - opened} sealed before them)" if opened < len(topic.parts) else ""
    return f"{opened} part{'s' if opened != 1 else ''} in {groups} group{'s' if groups != 1 else ''}{sealed}"


def numbers_text(parts: Sequence[int]) -> str:
    """Numbers of parts in words, such as `parts 1-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(set(parts)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    said = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"part{'s' if len(set(parts)) > 1 else ''} {said}"


def settings_text(topic: topic_pb2.TopicDescription) -> str:
    """The retention, compaction and the rates in words."""
    settings = topic.settings
    age, size = settings.retention_s, settings.retention_bytes
    said = [duration_text(age * 1000)] if age else []
    said += [f"{size:,} bytes a part"] if size else []
    said += ["until all channels have acknowledged it"] if settings.retain_acknowledged else []
    last = ", the last message of each key" if settings.compact else ""
    taken = _rates_text("takes", settings.messages_per_s, settings.bytes_per_s)
    given = _rates_text("gives", settings.read_messages_per_s, settings.read_bytes_per_s)
    stored = f", stored in {settings.store}" if settings.store else ""
    return "kept " + (" or ".join(said) if said else "for ever") + last + taken + given + stored


def _rates_text(what: str, messages: int, size: int) -> str:
    rates = [f"{messages:,} messages"] if messages else []
    rates += [f"{size:,} bytes"] if size else []
    return f", {what} {' and '.join(rates)} a second" if rates else ""


def _table(*names: str) -> Table:
    """An empty table; a column whose name ends with a colon is for numbers."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name.rstrip(":"), justify="right" if name.endswith(":") else "left")
    return table
