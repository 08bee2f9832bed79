"""Changes of a topic: each makes the next version of its node, or is refused. Pure.

Each function takes the node and returns the new one, which is the same object if nothing changes. Raises a `PixiuError`.

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from admin import events as ev
from admin.placement import Places
from pixiu.discovery import topics as tp
from pixiu.discovery.topics import Numbers, PartState, TopicChannel, TopicNode, TopicPart, TopicSettings
from pixiu.errors import InvalidArgument, LimitError, TopicExists, TopicInUse, UnknownTopic
from pixiu.ids import MAX_ID
from pixiu.objects.manifest import check_url
from pixiu.objects.store import check_protocol
from pixiu.placement.slots import SLOTS, Lineage, Range
from pixiu.wire import filters

BIN_MS: Final = 24 * 3_600_000
"""Time for which a deleted topic can be restored."""
MAX_CLUSTER_PARTS: Final = 20_000
"""Parts of all topics, sealed ones included. Policy: a change that would make more is refused."""
MAX_NEW_PARTS: Final = 4_096
"""Parts that one change may make."""


class Cluster(NamedTuple):
    """The rest of the cluster, as far as a change has to know it."""

    places: Places
    numbers: Numbers
    topics: int
    """Topics there are."""
    parts: int
    """Parts of all topics."""


def created(name: str, node: TopicNode | None, change: ev.CreateTopic, cluster: Cluster) -> TopicNode:
    """A new topic, with the next number."""
    tp.check_name(name)
    if node is not None:
        if node.deleted_at_ms:
            raise TopicExists(
                f"a topic {name} is in the bin: `pixiu topic restore {name}` brings it back, `pixiu topic delete {name} --now` "
                "removes its messages"
            )
        if change.if_missing:
            return node
        raise TopicExists(f"there is a topic {name} already; `--if-missing` (if_missing=True) takes it as it is")
    if cluster.topics >= tp.MAX_TOPICS:
        raise LimitError(f"this cluster has {tp.MAX_TOPICS:,} topics, the most there may be, those in the bin included")
    groups = [] if change.parts else cluster.places.each()
    count = change.parts or len(groups)
    if count > MAX_NEW_PARTS:
        raise LimitError(f"a topic begins with at most {MAX_NEW_PARTS:,} parts, not {count:,}; it can be split later")
    _check_parts(cluster, count)
    if change.parts:
        groups = cluster.places.choose(count)
    bounds = [SLOTS * at // count for at in range(count + 1)]
    ranges = [Range(*each) for each in zip(bounds, bounds[1:], groups, strict=False)]
    made = TopicNode(name, cluster.numbers.topic + 1, 1, _parts(Lineage.new(ranges), {}))
    return altered(made, ev.AlterTopic(**_settings(change)), version=1)


def _settings(found: TopicSettings) -> dict[str, Any]:
    return {name: getattr(found, name) for name in tp.SETTINGS}


def altered(node: TopicNode, change: ev.AlterTopic, version: int = 0) -> TopicNode:
    """The topic with other settings. version: 0: the next one."""
    _live(node)
    wanted = _settings(change)
    check_url(change.store)
    if change.store != node.store:
        check_protocol(change.store)
    numbers = [value for value in wanted.values() if isinstance(value, int)]
    if not 0 <= change.retention_s <= MAX_ID // 1_000_000 or any(not 0 <= value <= MAX_ID for value in numbers):
        raise InvalidArgument("the retention must be a number of seconds and of bytes, and rates whole numbers; 0: no limit")
    if not change.retain_acknowledged <= 1 or change.compact >= 1 << 32:
        raise InvalidArgument(f"a tombstone is kept for at most {(1 << 32) - 1} seconds, and retain_acknowledged is true or false")
    if change.compact and change.store:
        raise InvalidArgument("a topic is compacted or has an object store, whose objects never change; choose one of them")
    if bool(change.compact) is not bool(node.compact) and not version:
        raise InvalidArgument(
            f"topic {node.name} is {'' if node.compact else 'not '}compacted, as it was created: its keys are known from its "
            "first message on; create another topic"
        )
    if wanted == _settings(node):
        return node
    return replace(node, version=version or node.version + 1, **wanted)


def deleted(node: TopicNode, change: ev.DeleteTopic, wall_ms: int, members: int = 0) -> TopicNode:
    """The topic in the bin, or with `now` on its way out. members: of all its channels."""
    if members and not change.force and not node.deleted_at_ms:
        who = "1 member reads" if members == 1 else f"{members} members read"
        raise TopicInUse(f"{who} topic {node.name}; `pixiu topic delete {node.name} --force` deletes it anyway")
    if node.purging or (node.deleted_at_ms and not change.now):
        return node
    if not change.now and any(part.state is PartState.OPENING for part in node.parts):
        # A group forgets a deleted topic of which it has no part, and could not open one.
        raise TopicInUse(f"parts of topic {node.name} are being opened; try again, or `pixiu topic delete {node.name} --now`")
    at = node.deleted_at_ms or wall_ms
    return replace(
        node,
        version=node.version + 1,
        deleted_at_ms=at,
        purge_at_ms=wall_ms if change.now else at + BIN_MS,
        purging=change.now,
    )


def purged(node: TopicNode) -> TopicNode:
    """The topic whose time in the bin is over."""
    return replace(node, version=node.version + 1, purging=True)


def restored(node: TopicNode) -> TopicNode:
    """The topic out of the bin."""
    if node.purging:
        raise UnknownTopic(f"the messages of topic {node.name} are being removed; it cannot be restored any more")
    if not node.deleted_at_ms:
        raise InvalidArgument(f"topic {node.name} is not deleted: there is nothing to restore, and nothing was changed")
    return replace(node, version=node.version + 1, deleted_at_ms=0, purge_at_ms=0)


def channel_set(node: TopicNode, change: ev.SetChannel, numbers: Numbers) -> TopicNode:
    """The topic with a channel, new or changed. A new one has the next number."""
    _live(node)
    tp.check_name(change.name, "channel")
    _check_filter(change.filter)
    found, version = node.channel(change.name), node.version + 1
    attempts = change.max_attempts or (found.max_attempts if found else tp.DEFAULT_ATTEMPTS)
    timeout_ms = change.timeout_ms or (found.timeout_ms if found else tp.DEFAULT_TIMEOUT_MS)
    if not 1 <= attempts <= tp.MAX_ATTEMPTS:
        raise InvalidArgument(f"a message has 1 to {tp.MAX_ATTEMPTS:,} attempts, not {attempts:,}")
    if not tp.MIN_TIMEOUT_MS <= timeout_ms <= tp.MAX_TIMEOUT_MS:
        raise InvalidArgument(
            f"a member may keep a message for {tp.MIN_TIMEOUT_MS} ms to {tp.MAX_TIMEOUT_MS:,} ms, not {timeout_ms:,}"
        )
    if found is not None:
        _check_made(node, found, change)
        wanted = replace(found, max_attempts=attempts, timeout_ms=timeout_ms, filter=change.filter)
        if wanted == found:
            return node
        return _with_channels(node, [replace(wanted, version=version) if each is found else each for each in node.channels])
    if sum(not each.removed for each in node.channels) >= tp.MAX_CHANNELS:
        raise LimitError(f"topic {node.name} has {tp.MAX_CHANNELS:,} channels, the most it may have; remove one first")
    if len(node.channels) >= 2 * tp.MAX_CHANNELS:
        raise LimitError(f"groups of topic {node.name} have not yet removed {tp.MAX_CHANNELS:,} of its channels; try again later")
    made = TopicChannel(
        numbers.channel + 1, change.name, change.ordered, change.from_end, attempts, timeout_ms, change.filter, version
    )
    return _with_channels(node, [*node.channels, made])


def _check_made(node: TopicNode, found: TopicChannel, change: ev.SetChannel) -> None:
    """Raise InvalidArgument if a channel that is there is asked for what only a new one gets."""
    if change.ordered and not found.ordered:
        what = "gives messages in any order, and it cannot become ordered"
    elif change.from_end and not found.from_end:
        what = f"began with what was kept; `pixiu topic seek {node.name} {found.name} --to end` skips what is there"
    else:
        return
    raise InvalidArgument(f"the channel {found.name} of {node.name} is there and {what}; or use another name")


def channel_removed(node: TopicNode, change: ev.RemoveChannel) -> TopicNode:
    """The topic without a channel; it is kept, as removed, until all groups know."""
    _live(node)
    found = node.channel(change.name)
    if found is None:
        if any(each.name == change.name for each in node.channels):
            return node
        raise UnknownTopic(f"topic {node.name} has no channel {change.name[:128]}; `pixiu topic channels {node.name}` lists them")
    gone = replace(found, removed=True, version=node.version + 1)
    return _with_channels(node, [gone if each is found else each for each in node.channels])


def resized(node: TopicNode, change: ev.Resize, cluster: Cluster) -> TopicNode:
    """The topic whose parts are to be sealed and followed by others."""
    _live(node)
    parents = [_open_part(node, number) for number in sorted(set(change.parts))]
    if not parents:
        raise InvalidArgument("a resize names at least one part")
    parents.sort(key=lambda part: part.low)
    if any(left.high != right.low for left, right in pairwise(parents)):
        raise InvalidArgument("parts that are merged must adjoin each other: their slots must follow each other without a hole")
    low, high = parents[0].low, parents[-1].high
    bounds = [low, *change.bounds, high]
    if any(left >= right for left, right in pairwise(bounds)):
        raise InvalidArgument(f"the children's first slots must rise, and lie between {low} and {high}")
    count = len(bounds) - 1
    if count > MAX_NEW_PARTS:
        raise LimitError(f"one change makes at most {MAX_NEW_PARTS:,} parts, not {count:,}")
    _check_parts(cluster, count)
    if change.groups and len(change.groups) != count:
        raise InvalidArgument(f"there are {count} children, and {len(change.groups)} groups; name one for each child, or none")
    moved = len(parents) == 1 and count == 1
    avoid = (parents[0].group,) if moved else ()
    groups = cluster.places.take(change.groups) if change.groups else cluster.places.choose(count, avoid)
    if moved and groups[0] == parents[0].group:
        raise InvalidArgument(f"part {parents[0].number} is in group {groups[0]} already")
    ranges = [Range(*each) for each in zip(bounds, bounds[1:], groups, strict=False)]
    sealing = {part.number for part in parents}
    lineage = node.lineage().resized(sealing, ranges)
    states = {part.number: replace(part, state=PartState.SEALING) if part.number in sealing else part for part in node.parts}
    return replace(node, version=node.version + 1, parts=_parts(lineage, states))


def dropping(node: TopicNode, numbers: Sequence[int]) -> TopicNode:
    """The topic whose sealed parts of these numbers, which hold nothing any more, are to be forgotten by their groups."""
    gone = set(numbers)
    parts = tuple(replace(part, state=PartState.DROPPING) if part.number in gone else part for part in node.parts)
    return replace(node, version=node.version + 1, parts=parts)


def largest(node: TopicNode, wall_ms: int) -> TopicNode:
    """The topic with as many bytes as it may take without another change: when its parts are sealed, and then dropped."""
    version = node.version + len(node.parts) + 2
    parts = tuple(
        replace(part, state=PartState.DROPPING, sealed_at_ms=wall_ms) if part.state in tp.ENDED else part for part in node.parts
    )
    return replace(node, version=version, settled=version, parts=parts)


def _live(node: TopicNode) -> None:
    if node.deleted_at_ms:
        raise UnknownTopic(f"topic {node.name} is deleted; `pixiu topic restore {node.name}` brings it back within a day")


def _open_part(node: TopicNode, number: int) -> TopicPart:
    part = node.part(number)
    if part is None:
        raise UnknownTopic(f"topic {node.name} has no part {number}; `pixiu topic show {node.name}` lists them")
    if part.state is not PartState.OPEN:
        children = ", ".join(str(each.number) for each in node.parts if number in each.parents)
        raise TopicInUse(
            f"part {number} of topic {node.name} is {part.state.value}; only open parts can be followed by others"
            + (f"; its slots went to {children}" if children else "")
        )
    return part


def _check_parts(cluster: Cluster, count: int) -> None:
    if cluster.parts + count > MAX_CLUSTER_PARTS:
        raise LimitError(
            f"this cluster has {cluster.parts:,} parts, and may have {MAX_CLUSTER_PARTS:,}, sealed ones included: {count:,} more "
            "are too many"
        )


def _check_filter(text: str) -> None:
    if len(text) > tp.MAX_FILTER:
        raise LimitError(f"a filter has at most {tp.MAX_FILTER:,} characters, not {len(text):,}")
    if text:
        filters.parse(text)


def _with_channels(node: TopicNode, channels: Sequence[TopicChannel]) -> TopicNode:
    return replace(node, version=node.version + 1, channels=tuple(channels))


def _parts(lineage: Lineage, known: dict[int, TopicPart]) -> tuple[TopicPart, ...]:
    return tuple(
        known.get(part.number) or TopicPart(part.number, part.low, part.high, part.group, PartState.OPENING, part.parents)
        for part in lineage.parts.values()
    )
