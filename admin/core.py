"""The admin's core: makes groups agree with what the registry says of topics, and changes what it says. Pure.

    ChangeRequested ─▶ changes.py ─▶ WriteTopic ─▶ Written ─▶ steps.py ─▶ Append … Appended ─▶ WriteTopic ─▶ Written ─▶ Answer
                       next node                              entries that groups lack         node, settled

It is driven by levels: the node in the registry says what is wanted, and every entry may be appended again. So a new leader needs
nothing but the registry, wherever its predecessor ended.

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from admin import changes, entries, steps
from admin import events as ev
from admin.balancer import Asked as AskedPlan
from admin.balancer import Balancer
from admin.placement import Places
from admin.steps import Done, Step
from admin.tracked import MAX_ASKED, Asked, Group, Topic, Waiting
from cluster.core.contract import NEVER, EventTable, Tick
from cluster.topics.entries import part_id
from pixiu.discovery.topics import Numbers, PartState, TopicNode, check_name
from pixiu.errors import (
    InvalidArgument,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    PixiuError,
    Refusal,
    Unavailable,
    UnknownTopic,
)

MAX_CHANGES: Final = 1_000
"""Changes that clients wait for. Policy: further ones are refused."""
MAX_TRIES: Final = 5
"""Writes of one change that fail before it is refused."""
ANSWER_S: Final = 20.0
"""Time in which a change should be in effect; after that its client is told that it is recorded."""
REFUSED_S: Final = 30.0
"""Pause of a topic after an entry that a group refused: somebody has to change the topic, or the cluster."""
LOAD_S: Final = 30.0
"""Interval of asking groups for their parts."""
SEALED_KEPT_MS: Final = 3_600_000
"""Time for which a sealed part is kept at least, though it holds nothing: late writers ask it for their positions."""
GONE: Final = 1 << 63
"""Version that a client waits for who wants the topic removed."""


@dataclass(slots=True)
class Counters:
    """Counts since the start of the process."""

    changes: int = 0
    changes_refused: int = 0
    writes: int = 0
    writes_failed: int = 0
    moves: int = 0
    """Of parts, by load, without being asked."""
    entries: int = 0
    entries_failed: int = 0
    entries_refused: int = 0


class _NotYet(Exception):
    """A change waits for answers of groups."""


class Core:
    """Decides what the leading admin does. See the module.

    Args:
        moves_per_hour: moves of parts by load; 0: none.
    """

    def __init__(self, moves_per_hour: int = 0) -> None:
        self.counters = Counters()
        self._balancer = Balancer(moves_per_hour)
        self.epoch = 0
        """The epoch in which it leads; 0: it does not."""
        self.topics: dict[str, Topic] = {}
        self._names: dict[int, str] = {}
        """ID of a topic → its name."""
        self._numbers = Numbers()
        self._wall_ms, self._wall_at = 0, 0.0
        self._groups: dict[int, Group] = {}
        self._layout: tuple[tuple[int, ...], frozenset[int]] = ((), frozenset())
        self._appends: dict[int, tuple[str, Step]] = {}
        """Token → topic (empty: none) and entry that a group is asked for."""
        self._writes: dict[int, str] = {}
        self._next_token = 1
        self._clients = 0
        self._deadlines: deque[tuple[float, str]] = deque()
        """Times at which clients are to be answered, rising, and their topics."""
        self._bin: dict[str, int] = {}
        """Deleted topic → time of its purge, Unix milliseconds."""
        self._held: dict[str, float] = {}
        """Topic of which a group refused an entry → time from which it is tried again."""
        self._next_load = NEVER
        table: EventTable[ev.Effect] = EventTable()
        table.on(ev.Elected, self._on_elected)
        table.on(ev.Deposed, self._on_deposed)
        table.on(ev.GroupsChanged, self._on_groups)
        table.on(ev.ChangeRequested, self._on_change)
        table.on(ev.PlanRequested, self._on_plan)
        table.on(ev.Written, self._on_written)
        table.on(ev.Appended, self._on_appended)
        table.on(ev.LoadRead, self._on_load)
        table.on(Tick, self._on_tick)
        self._table = table

    def step(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Take an event; returns the effects, in order."""
        return self._table.step(event, now)

    def next_deadline(self) -> float:
        """Return the time at which a `Tick` is due."""
        if not self.epoch:
            return NEVER
        resting = (group for group in self._groups.values() if group.waiting and group.problem and group.asked < MAX_ASKED)
        found = [self._next_load, *(group.retry_at for group in resting)]
        if self._deadlines:
            found.append(self._deadlines[0][0])
        found += self._held.values()
        purge_ms = min((at for name, at in self._bin.items() if not self.topics[name].writing), default=None)
        if purge_ms is not None:
            found.append(self._wall_at + (purge_ms - self._wall_ms) / 1000)
        return min(found)

    # --- what others may know

    def under_way(self) -> list[str]:
        """The topics with something left to be done, in words."""
        found = []
        for topic in self.topics.values():
            if topic.node is not None and not topic.settled:
                groups = sorted({step.group for queue in topic.steps.values() for step in queue})
                why = [f"group {group}: {self._group(group).problem}" for group in groups if self._group(group).problem]
                text = topic.problem or "; ".join(why)
                found.append(f"{topic.name}, version {topic.node.version}" + (f": {text}" if text else ""))
        return found

    def places(self) -> Places:
        """The groups and how full they are."""
        parts = Counter(part.group for node in self.nodes() for part in node.parts)
        stored = {number: sum(load.stored_bytes for load in group.loads.values()) for number, group in self._groups.items()}
        return Places(self._layout[0], self._layout[1], parts, stored)

    def loads(self) -> dict[int, ev.Load]:
        """ID of a part → its load when its group was asked last."""
        return {part: load for group in self._groups.values() for part, load in group.loads.items()}

    def nodes(self) -> Iterator[TopicNode]:
        """The topics as the registry has them."""
        return (topic.node for topic in self.topics.values() if topic.node is not None)

    def _group(self, number: int) -> Group:
        found = self._groups.get(number)
        if found is None:
            found = self._groups[number] = Group()
        return found

    def _wall(self, now: float) -> int:
        return self._wall_ms + int((now - self._wall_at) * 1000)

    def _token(self) -> int:
        token, self._next_token = self._next_token, self._next_token + 1
        return token

    # --- leadership

    def _on_elected(self, event: ev.Elected, now: float, out: list[ev.Effect]) -> None:
        self._forget(out)
        self.epoch, self._wall_ms, self._wall_at = event.epoch, event.wall_ms, now
        self._next_load = now
        self._balancer.elected(now)
        self._numbers = event.numbers
        for name, (version, node) in event.topics.items():
            self.topics[name] = topic = Topic(name)
            self._take(topic, version, node)
        for topic in list(self.topics.values()):
            if not topic.settled:
                self._advance(topic, now, out)

    def _on_deposed(self, event: ev.Deposed, now: float, out: list[ev.Effect]) -> None:
        self._forget(out)

    def _forget(self, out: list[ev.Effect]) -> None:
        """Forget everything, and answer all clients: what is recorded takes effect by the next leader."""
        not_leader = Refusal.of(NotLeader("this admin does not lead any more"))
        for topic in self.topics.values():
            for at, asked in enumerate(topic.changes):
                # A change that is being written may be recorded.
                out.append(ev.Answer(asked.request, None, not_leader if at or not topic.writes_change else _recorded(topic)))
            out += [ev.Answer(each.request, None, _recorded(topic)) for each in topic.waiting]
        for found in (self.topics, self._names, self._bin, self._held, self._deadlines, self._appends, self._writes):
            found.clear()
        for group in self._groups.values():
            group.forget()
        out += [ev.Planned(each.request, refusal=not_leader) for each in self._balancer.asked]
        self._balancer.asked.clear()
        self._clients = self.epoch = 0

    def _on_groups(self, event: ev.GroupsChanged, now: float, out: list[ev.Effect]) -> None:
        before, running = self._layout[1], frozenset(event.running)
        self._layout = tuple(sorted(event.groups)), running
        for number in sorted(running - before):
            self._group(number).answered()
            self._serve(number, now, out)

    # --- changes of clients

    def _on_change(self, event: ev.ChangeRequested, now: float, out: list[ev.Effect]) -> None:
        self.counters.changes += 1
        try:
            if not self.epoch:
                raise NotLeader("this admin does not lead")
            if self._clients >= MAX_CHANGES:
                text = f"{MAX_CHANGES:,} changes of topics are under way; wait for some of them"
                raise Overloaded(text, retry_after_ms=1_000)
            check_name(event.name)
        except PixiuError as error:
            self.counters.changes_refused += 1
            out.append(ev.Answer(event.request, None, Refusal.of(error)))
            return
        topic = self.topics.get(event.name)
        if topic is None:
            topic = self.topics[event.name] = Topic(event.name)
        self._clients += 1
        topic.changes.append(Asked(event.request, event.change, now))
        if isinstance(event.change, ev.DeleteTopic) and not event.change.force and topic.node is not None:
            out += [ev.AskLoad(group) for group in topic.node.groups]
        self._deadlines.append((now + ANSWER_S, topic.name))
        self._advance(topic, now, out)

    def _answer(self, request: int, out: list[ev.Effect], node: TopicNode | None = None, refusal: Refusal | None = None) -> None:
        self._clients -= 1
        self.counters.changes_refused += refusal is not None
        out.append(ev.Answer(request, node, refusal))

    def _change(self, topic: Topic, now: float, out: list[ev.Effect]) -> None:
        """Take the changes that clients ask for, one after the other, until one is being written or has to wait."""
        while topic.changes and not topic.writing:
            asked = topic.changes[0]
            try:
                node = self._changed(topic, asked, now)
                if node is not topic.node:
                    changes.largest(node, self._wall(now)).to_json()
                    self._write(topic, node, out)
                    topic.writes_change = True
                    return
            except _NotYet:
                return
            except PixiuError as error:
                topic.changes.popleft()
                self._answer(asked.request, out, refusal=Refusal.of(error))
                continue
            topic.changes.popleft()
            self._await(topic, asked, now)

    def _await(self, topic: Topic, asked: Asked, now: float) -> None:
        assert topic.node is not None
        purges = isinstance(asked.change, ev.DeleteTopic) and asked.change.now
        topic.waiting.append(Waiting(asked.request, GONE if purges else topic.node.version, now + ANSWER_S))
        self._deadlines.append((now + ANSWER_S, topic.name))

    def _changed(self, topic: Topic, asked: Asked, now: float) -> TopicNode:
        """The node that a change makes. Raises a PixiuError, `_NotYet`."""
        node, change = topic.node, asked.change
        if isinstance(change, ev.CreateTopic):
            made = changes.created(topic.name, node, change, self._cluster())
            self._note_numbers(made)
            return made
        if node is None:
            raise UnknownTopic(f"there is no topic {topic.name}; `pixiu topic create {topic.name}` makes it")
        match change:
            case ev.AlterTopic():
                return changes.altered(node, change)
            case ev.DeleteTopic():
                return changes.deleted(node, change, self._wall(now), self._members(topic, node, asked))
            case ev.RestoreTopic():
                return changes.restored(node)
            case ev.SetChannel():
                made = changes.channel_set(node, change, self._numbers)
                self._note_numbers(made)
                return made
            case ev.RemoveChannel():
                return changes.channel_removed(node, change)
            case ev.Resize():
                return changes.resized(node, change, self._cluster())

    def _note_numbers(self, node: TopicNode) -> None:
        channel = max((channel.channel for channel in node.channels), default=0)
        self._numbers = Numbers(max(self._numbers.topic, node.topic), max(self._numbers.channel, channel))

    def _cluster(self) -> changes.Cluster:
        nodes = list(self.nodes())
        parts = sum(len(node.parts) for node in nodes)
        return changes.Cluster(self.places(), self._numbers, len(nodes), parts)

    def _members(self, topic: Topic, node: TopicNode, asked: Asked) -> int:
        """Members of a topic, as its groups say since the change was asked for. Raises `_NotYet`, `Unavailable`."""
        assert isinstance(asked.change, ev.DeleteTopic)
        if asked.change.force or node.deleted_at_ms:
            return 0
        found = 0
        for number in node.groups:
            group = self._group(number)
            if group.load_failed_at >= asked.since:
                raise Unavailable(
                    f"group {number} does not answer, so whether topic {topic.name} has members is unknown: try again later, or "
                    f"`pixiu topic delete {topic.name} --force`"
                )
            if group.load_at < asked.since:
                raise _NotYet
            # A leader reports the members of the whole topic that it has, with each of its parts.
            found = max([found, *(load.members for part, load in group.loads.items() if part >> 32 == node.topic)])
        return found

    # --- the registry

    def _write(self, topic: Topic, node: TopicNode | None, out: list[ev.Effect]) -> None:
        self.counters.writes += 1
        topic.writing, topic.intended, topic.writes_change = self._token(), node, False
        self._writes[topic.writing] = topic.name
        out.append(ev.WriteTopic(topic.writing, topic.name, topic.version, node, self._numbers))

    def _on_written(self, event: ev.Written, now: float, out: list[ev.Effect]) -> None:
        topic = self.topics.get(self._writes.pop(event.token, ""))
        if topic is None:
            return
        before, as_intended = topic.node, event.node == topic.intended
        of_change, topic.writing, topic.writes_change, topic.stale = topic.writes_change, 0, False, True
        self.counters.writes_failed += not as_intended
        self._take(topic, event.version, event.node)
        if of_change:
            asked = topic.changes[0]
            asked.tries += 1
            if as_intended or asked.tries >= MAX_TRIES:
                topic.changes.popleft()
                if as_intended:
                    self._await(topic, asked, now)
                else:
                    problem = Unavailable(f"the registry did not take the change of topic {topic.name}; try again later")
                    self._answer(asked.request, out, refusal=Refusal.of(problem))
        if topic.node is None:
            self._removed(topic, before, out)
        self._advance(topic, now, out)

    def _take(self, topic: Topic, version: int, node: TopicNode | None) -> None:
        """Take what the registry says."""
        if topic.node is not None:
            self._names.pop(topic.node.topic, None)
            for part in topic.node.parts:
                if node is None or node.part(part.number) is None:
                    self._group(part.group).loads.pop(part_id(topic.node.topic, part.number), None)
        topic.version, topic.node = version, node
        self._bin.pop(topic.name, None)
        self._held.pop(topic.name, None)
        if node is None:
            return
        self._names[node.topic] = topic.name
        self._note_numbers(node)
        if node.deleted_at_ms and not node.purging:
            self._bin[topic.name] = node.purge_at_ms

    def _removed(self, topic: Topic, before: TopicNode | None, out: list[ev.Effect]) -> None:
        """The topic is gone from the registry: answer those who waited for this, and for anything else of it."""
        for each in topic.waiting:
            if each.version == GONE:
                self._answer(each.request, out, node=before)
            else:
                gone = UnknownTopic(f"topic {topic.name} was removed meanwhile")
                self._answer(each.request, out, refusal=Refusal.of(gone))
        topic.waiting.clear()
        topic.done.clear()
        topic.steps.clear()

    # --- the groups

    def _advance(self, topic: Topic, now: float, out: list[ev.Effect]) -> None:
        """Do what can be done for a topic now."""
        if topic.writing:
            return
        self._change(topic, now, out)
        if topic.writing:
            return
        if topic.node is None:
            if topic.idle:
                self.topics.pop(topic.name, None)
            return
        if topic.settled:
            topic.done.clear()
            topic.steps.clear()
            topic.problem = ""
        elif topic.name not in self._held:
            self._work(topic, topic.node, now, out)
        if not topic.writing and topic.node is not None:
            self._answer_settled(topic, topic.node, out)

    def _answer_settled(self, topic: Topic, node: TopicNode, out: list[ev.Effect]) -> None:
        for each in topic.waiting:
            if each.version <= node.settled:
                self._answer(each.request, out, node=node)
        topic.waiting = [each for each in topic.waiting if each.version > node.settled]

    def _work(self, topic: Topic, node: TopicNode, now: float, out: list[ev.Effect]) -> None:
        """Ask groups for what they lack; without any answer to come, record what they have."""
        if topic.stale:
            topic.stale = False
            topic.steps.clear()
            for step in steps.ready(node, topic.done):
                if step.key not in topic.asked:
                    topic.steps.setdefault(step.group, deque()).append(step)
        for number in list(topic.steps):
            self._ask(topic, number, now, out)
        if topic.asked:
            return
        assert topic.steps or next(steps.ready(node, topic.done), None) is None, topic.name
        after = steps.after(node, topic.done, self._wall(now))
        if after is not node:
            self._write(topic, after, out)

    def _ask(self, topic: Topic, number: int, now: float, out: list[ev.Effect]) -> None:
        """Ask a group for a topic's entries, as many as it may be asked for."""
        group, queue = self._group(number), topic.steps.get(number)
        group.waiting.pop(topic.name, None)
        while queue and group.may_ask(now):
            self._append(group, topic.name, queue.popleft(), out)
        if queue:
            group.waiting[topic.name] = None
        else:
            topic.steps.pop(number, None)

    def _append(self, group: Group, name: str, step: Step, out: list[ev.Effect]) -> None:
        self.counters.entries += 1
        group.asked += 1
        token = self._token()
        self._appends[token] = name, step
        if name:
            self.topics[name].asked.add(step.key)
        out.append(ev.Append(token, step.group, step.kind, step.payload))

    def _serve(self, number: int, now: float, out: list[ev.Effect]) -> None:
        """Ask a group for the entries that wait for it, topic by topic."""
        group = self._group(number)
        for name in list(group.waiting):
            if not group.may_ask(now):
                return
            topic = self.topics.get(name)
            if topic is None or topic.writing:
                group.waiting.pop(name, None)
            else:
                self._ask(topic, number, now, out)

    def _on_appended(self, event: ev.Appended, now: float, out: list[ev.Effect]) -> None:
        name, step = self._appends.pop(event.token, ("", None))
        if step is None:
            return
        group, topic = self._group(step.group), self.topics.get(name)
        group.asked -= 1
        if topic is not None:
            topic.asked.discard(step.key)
            topic.stale = topic.stale or bool(event.failure) or steps.leads_on(step)
        if event.failure:
            self.counters.entries_failed += 1
            group.failed(event.failure, now)
        else:
            group.answered()
            if topic is not None and topic.node is not None:
                self._answered(topic, step, event, now, out)
        if topic is not None:
            self._advance(topic, now, out)
        self._serve(step.group, now, out)

    def _answered(self, topic: Topic, step: Step, event: ev.Appended, now: float, out: list[ev.Effect]) -> None:
        if event.ok:
            topic.done[step.key] = Done(step.version, event.writers)
            return
        topic.stale = True
        if topic.node is not None and step.made < topic.node.version:
            return  # the group may know the newer version already
        self.counters.entries_refused += 1
        topic.problem = f"group {step.group} refuses {entries.NAMES[step.kind]}: {event.why or 'no reason given'}"
        self._held[topic.name] = now + REFUSED_S
        for each in topic.waiting:
            self._answer(each.request, out, refusal=Refusal.of(InvalidArgument(f"topic {topic.name}: {topic.problem}")))
        topic.waiting.clear()

    def _on_load(self, event: ev.LoadRead, now: float, out: list[ev.Effect]) -> None:
        group = self._group(event.group)
        group.loaded(event, now)
        if not self.epoch:
            return
        out += self._balancer.answers(self._groups, self._asked_for_load(), self.nodes())
        if event.parts is not None:
            self._drop_empty(event.group, group, now, out)
        for topic in list(self.topics.values()):
            if topic.changes and not topic.writing:
                self._advance(topic, now, out)
        self._move(now, out)

    # --- load

    def _asked_for_load(self) -> list[int]:
        return [group for group in self._layout[0] if group in self._layout[1]]

    def _on_plan(self, event: ev.PlanRequested, now: float, out: list[ev.Effect]) -> None:
        asked, groups = AskedPlan(event.request, event.drain, now), self._asked_for_load()
        error: PixiuError | None = None
        if not self.epoch:
            error = NotLeader("this admin does not lead")
        elif not groups:
            error = Unavailable("no group of topics is running: `pixiu status` shows their replicas")
        elif len(self._balancer.asked) >= MAX_CHANGES:
            error = Overloaded(f"{MAX_CHANGES:,} plans are asked for at this time; try again", retry_after_ms=1_000)
        if error is not None:
            out.append(ev.Planned(event.request, refusal=Refusal.of(error)))
            return
        self._balancer.asked.append(asked)
        for group in groups:
            self._group(group)
            out.append(ev.AskLoad(group))

    def _move(self, now: float, out: list[ev.Effect]) -> None:
        """Move a part by load, if one is due: one at a time of each group."""
        move = self._balancer.next_move(self._groups, self._asked_for_load(), self.nodes(), now)
        topic = self.topics.get(move.topic) if move is not None else None
        if move is None or topic is None or topic.node is None or topic.writing or not topic.settled:
            return
        try:
            node = changes.resized(topic.node, ev.Resize((move.part,), (), (move.target,)), self._cluster())
            changes.largest(node, self._wall(now)).to_json()
        except PixiuError:
            return  # a limit is reached, which the admin says to those who ask for a change
        self.counters.moves += 1
        self._balancer.moved(move, node.parts[-1].number, now)
        self._write(topic, node, out)

    def strays(self) -> list[int]:
        """IDs of parts that groups hold and the registry does not know. They are reported and left alone: the registry may have
        been restored from a backup that is older than they are."""
        return sorted(part for part in self.loads() if self._is_stray(part)) if self.epoch else []

    def _is_stray(self, part: int) -> bool:
        topic = self.topics.get(self._names.get(part >> 32, ""))
        if topic is None or topic.node is None:
            return True
        return not topic.writing and topic.node.part(part & 0xFFFFFFFF) is None

    def _drop_empty(self, number: int, group: Group, now: float, out: list[ev.Effect]) -> None:
        """Have sealed parts forgotten of which retention has left nothing, the oldest first."""
        wall_ms, empty = self._wall(now), dict[str, list[int]]()
        for part, load in group.loads.items():
            topic = self.topics.get(self._names.get(part >> 32, ""))
            if topic is None or topic.node is None or topic.writing or not load.sealed or load.first < load.end:
                continue
            found = topic.node.part(part & 0xFFFFFFFF)
            if found is None or found.group != number or found.state is not PartState.SEALED:
                continue
            kept = any(topic.node.part(parent) is not None for parent in found.parents)
            if not kept and found.sealed_at_ms + SEALED_KEPT_MS <= wall_ms:
                empty.setdefault(topic.name, []).append(found.number)
        for name, numbers in empty.items():
            topic = self.topics[name]
            if topic.node is not None and not topic.node.deleted_at_ms:
                self._write(topic, changes.dropping(topic.node, numbers), out)

    # --- time

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        if not self.epoch:
            return
        if now >= self._next_load:
            self._next_load = now + LOAD_S
            out += [ev.AskLoad(group) for group in self._asked_for_load()]
        for number, group in list(self._groups.items()):
            if group.waiting and now >= group.retry_at:
                self._serve(number, now, out)
        for name in [name for name, at in self._held.items() if at <= now]:
            del self._held[name]
            self._advance(self.topics[name], now, out)
        wall_ms = self._wall(now)
        for name in [name for name, at in self._bin.items() if at <= wall_ms]:
            topic = self.topics[name]
            if not topic.writing and topic.node is not None:
                self._write(topic, changes.purged(topic.node), out)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = self._deadlines.popleft()
            if name in self.topics:
                self._late(self.topics[name], now, out)

    def _late(self, topic: Topic, now: float, out: list[ev.Effect]) -> None:
        """Answer the clients of a topic that have waited too long."""
        late = [each for each in topic.waiting if each.until <= now]
        topic.waiting = [each for each in topic.waiting if each.until > now]
        for each in late:
            self._answer(each.request, out, refusal=_recorded(topic, self._why(topic)))
        # The first change may be under way to the registry; then it is answered with what becomes of it.
        first = topic.changes[0] if topic.changes and topic.writes_change else None
        for asked in [each for each in topic.changes if each is not first and each.since + ANSWER_S <= now]:
            topic.changes.remove(asked)
            self._answer(asked.request, out, refusal=Refusal.of(Unavailable(f"topic {topic.name} is busy; try again later")))
        if topic.idle:
            self.topics.pop(topic.name, None)

    def _why(self, topic: Topic) -> str:
        groups = sorted({step.group for queue in topic.steps.values() for step in queue})
        why = [f"group {group} does not answer: {self._group(group).problem}" for group in groups if self._group(group).problem]
        return topic.problem or "; ".join(why)


def _recorded(topic: Topic, why: str = "") -> Refusal:
    text = f"the change of topic {topic.name} is recorded, and is not in effect yet" + (f": {why}" if why else "")
    return Refusal.of(OutcomeUnknown(f"{text}; `pixiu topic show {topic.name}` shows when it is"))
