"""All channels on the leader of a group: their members, and which of them have something to do. Pure.

Only channels that have or had a member, or that another leader asked for, cost anything; and in a turn only those of which a part
grew, a settlement was committed, a member reported, or a deadline has come.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cluster.core.contract import NEVER
from cluster.topics.entries import ChannelSettings, topic_of
from pixiu.errors import InvalidArgument, NotServed, Overloaded, PixiuError, Refusal
from pixiu.wire import filters
from topic.dispatch.dispatcher import Dispatcher
from topic.dispatch.flights import Pending
from topic.dispatch.members import Member
from topic.dispatch.sorting import WORK
from topic.events import AskParent, ChannelView, Deliver, Effect, Joined, MemberEnded, PartsFinished
from topic.state.state import State

MAX_MEMBERS: Final = 10_000
"""Members of all channels on a leader. Policy: one more is refused with OVERLOADED."""
MAX_CREDIT: Final = 10_000
"""Messages that a member may have. Policy: more is cut to this."""


class Channels:
    """The channels of a group, from the moment at which its leader may deliver.

    Args:
        state: of the group.
        make: a dispatcher for a channel.
    """

    def __init__(self, state: State, make: Callable[[ChannelSettings], Dispatcher]) -> None:
        self._state, self._make = state, make
        self._delivers = False
        self._by_number: dict[int, Dispatcher] = {}
        self._by_topic: dict[int, dict[int, Dispatcher]] = {}
        self._members: dict[int, Joined] = {}
        """Those that have joined; before the leader delivers they wait."""
        self._channel_of: dict[int, Dispatcher] = {}
        """By member."""
        self._awake: dict[int, None] = {}
        """Channels that may have something to give, in order."""
        self._alarms: list[tuple[float, int]] = []
        """(time, channel); some no longer count."""
        self._alarm_of: dict[int, float] = {}
        self._filter_errors = 0

    # --- which there are

    def _start(self, now: float, out: list[Effect]) -> None:
        self._delivers = True
        self._state.take_news()
        for event in list(self._members.values()):
            self._take_or_end(event, now, out)

    def stop(self, why: PixiuError, out: list[Effect]) -> None:
        """This replica leads no longer, or another epoch begins."""
        for member in list(self._members):
            self._end(member, why, out)
        self._delivers = False
        self._by_number, self._by_topic, self._awake = {}, {}, {}
        self._alarms, self._alarm_of = [], {}

    def look(self, now: float, out: list[Effect]) -> None:
        """Follow what the state says of topics, parts and channels since it was last looked at; at first, take the members that are
        here already."""
        if not self._delivers:
            self._start(now, out)
            return
        state = self._state
        for topic in state.take_news():
            settings = state.topics.get(topic)
            for number, dispatcher in list(self._by_topic.get(topic, {}).items()):
                channel = state.channels.get(number)
                if channel is None:
                    self._forget(number, NotServed("the channel was removed"), out)
                elif settings is None or settings.deleted:
                    name = settings.name if settings else f"{topic}"
                    self._forget(number, NotServed(f"the topic {name} is deleted; restore it, or use another one"), out)
                else:
                    dispatcher.update(channel)
                    dispatcher.look(now)
                    self.wake(number)

    def _forget(self, number: int, why: PixiuError, out: list[Effect]) -> None:
        dispatcher = self._by_number.pop(number)
        self._by_topic[dispatcher.settings.topic].pop(number)
        self._awake.pop(number, None)
        self._alarm_of.pop(number, None)
        for member in list(dispatcher.members):
            self._end(member, why, out)

    def get(self, number: int) -> Dispatcher | None:
        """A channel that has or had something to do."""
        return self._by_number.get(number)

    def made(self, number: int, now: float) -> Dispatcher | None:
        """A channel; None: there is none, or its topic is deleted, or the leader does not deliver."""
        found = self._by_number.get(number)
        settings = self._state.channels.get(number)
        if found is None and settings is not None and self._delivers and not self._state.topics[settings.topic].deleted:
            found = self._by_number[number] = self._make(settings)
            self._by_topic.setdefault(settings.topic, {})[number] = found
            found.look(now)
            self.wake(number)
        return found

    # --- members

    def join(self, event: Joined, now: float, out: list[Effect]) -> None:
        """A member wants a channel's messages."""
        if event.member in self._members:
            return
        if len(self._members) >= MAX_MEMBERS:
            problem = Overloaded(f"{MAX_MEMBERS} members are at this leader; end some, or try again later", 1000)
            out.append(MemberEnded(event.member, Refusal.of(problem)))
            return
        self._members[event.member] = event
        if self._delivers:
            self._take_or_end(event, now, out)

    def _take_or_end(self, event: Joined, now: float, out: list[Effect]) -> None:
        try:
            self._take(event, now, out)
        except PixiuError as problem:
            self._end(event.member, problem, out)

    def _take(self, event: Joined, now: float, out: list[Effect]) -> None:
        """Raises NotServed, InvalidArgument."""
        topic = self._state.topic_named(event.topic)
        if topic is None:
            raise NotServed(f"this group holds nothing of a topic {event.topic}; ask a proxy where it is")
        if topic.deleted:
            raise NotServed(f"the topic {event.topic} is deleted; restore it, or use another one")
        settings = self._state.channel_named(topic.topic, event.channel)
        if settings is None:
            raise NotServed(f"the topic {event.topic} has no channel {event.channel}; make it first")
        if event.filter and not filters.same(event.filter, settings.filter):
            theirs = settings.filter or "none"
            raise InvalidArgument(f"the channel {event.channel} has the filter {theirs}, and this member asks for {event.filter}")
        channel = self.made(settings.channel, now)
        assert channel is not None
        if len(channel.members) and event.load_test is not channel.wants.load_test:
            theirs, ours = channel.wants.load_test.name.lower(), event.load_test.name.lower()
            raise InvalidArgument(f"the members of the channel {event.channel} have load_test = {theirs}, this one has {ours}")
        member = Member(min(event.credit, MAX_CREDIT), name=event.name, tag=event.tag)
        channel.join(event.member, member, event.load_test)
        self._channel_of[event.member] = channel
        self.wake(settings.channel)
        finished = channel.finished_parts()
        if finished:
            out.append(PartsFinished(event.member, finished))

    def _end(self, member: int, why: PixiuError, out: list[Effect]) -> None:
        self._members.pop(member, None)
        self._channel_of.pop(member, None)
        out.append(MemberEnded(member, Refusal.of(why)))

    def of_member(self, member: int) -> Dispatcher | None:
        """The channel of a member that is here."""
        return self._channel_of.get(member)

    def credit(self, member: int, credit: int) -> None:
        """A member takes another number of messages at a time."""
        joined, channel = self._members.get(member), self._channel_of.get(member)
        if joined is not None:
            self._members[member] = replace(joined, credit=credit)
        if channel is not None:
            channel.members.set_credit(member, min(credit, MAX_CREDIT))
            self.wake(channel.settings.channel)

    def leave(self, member: int) -> list[Pending]:
        """A member is gone. Returns what is to be committed."""
        self._members.pop(member, None)
        channel = self._channel_of.pop(member, None)
        if channel is None:
            return []
        found = channel.leave(member)
        self.wake(channel.settings.channel)
        return found

    # --- what happens to them

    def wake(self, number: int) -> None:
        """A channel may have something to give, or another deadline."""
        self._awake[number] = None

    def grew(self, part: int) -> None:
        """A part has more messages."""
        for number, dispatcher in self._by_topic.get(topic_of(part), {}).items():
            dispatcher.wake(part)
            self._awake[number] = None

    def sealed(self, part: int, out: list[Effect]) -> None:
        """A part was sealed, which ends those that have all of it."""
        for number in self._by_topic.get(topic_of(part), {}):
            self.check_finished(number, part, out)
            self._awake[number] = None

    def check_finished(self, number: int, part: int, out: list[Effect]) -> None:
        """Something of a sealed part was settled."""
        dispatcher = self._by_number[number]
        if dispatcher.check_finished(part):
            out += [PartsFinished(member, [part]) for member in dispatcher.members]

    def finished(self, number: int, part: int, now: float) -> bool:
        """True if a channel has finished a part and all before it."""
        found = self.made(number, now)
        return found is not None and found.finished(part)

    def questions(self) -> list[AskParent]:
        """Parents in other groups that hold back parts here."""
        return [
            AskParent(number, part)
            for number, dispatcher in self._by_number.items()
            if dispatcher.is_blocked
            for part in sorted(dispatcher.missing_parents())
        ]

    def parent_finished(self, number: int, part: int) -> None:
        """A channel has finished a parent in another group."""
        found = self._by_number.get(number)
        if found is not None:
            found.parent_finished(part)
            self.wake(number)

    # --- turns

    def tick(self, now: float) -> list[Pending]:
        """Time has passed. Returns what is to be committed."""
        found = list[Pending]()
        while self._alarms and self._alarms[0][0] <= now:
            due, number = heapq.heappop(self._alarms)
            if self._alarm_of.get(number) == due:
                del self._alarm_of[number]
                found += self._by_number[number].tick(now)
                self.wake(number)
        return found

    def pump(self, now: float, out: list[Deliver]) -> list[Pending]:
        """Give members what is ready. Returns what is to be committed."""
        found, awake, work = list[Pending](), deque(self._awake), WORK
        self._awake = {}
        while awake and work > 0:
            number = awake.popleft()
            dispatcher = self._by_number.get(number)
            if dispatcher is not None:
                found += dispatcher.pump(now, out)
                work -= WORK - dispatcher.wants.work
                self._filter_errors += dispatcher.wants.new_errors
                dispatcher.wants.new_errors = 0
                if dispatcher.more:
                    self._awake[number] = None
                self._remind(number, dispatcher)
        self._awake = dict.fromkeys(awake) | self._awake  # in the next turn, these come first
        return found

    def _remind(self, number: int, dispatcher: Dispatcher) -> None:
        due = dispatcher.next_deadline()
        if due < self._alarm_of.get(number, NEVER):
            self._alarm_of[number] = due
            heapq.heappush(self._alarms, (due, number))

    def take_filter_errors(self) -> int:
        """Messages for which filters had no value since the last call."""
        found, self._filter_errors = self._filter_errors, 0
        return found

    @property
    def is_awake(self) -> bool:
        """True if some may have something to give."""
        return bool(self._awake)

    def next_deadline(self) -> float:
        """Time at which one of them has something to do."""
        return self._alarms[0][0] if self._alarms else NEVER

    # --- queries

    def describe(self, number: int) -> list[ChannelView]:
        """A channel in each part that is here, by number."""
        settings = self._state.channels.get(number)
        if settings is None:
            return []
        dispatcher = self._by_number.get(number) or self._make(settings)
        return [dispatcher.describe(part) for part in self._state.parts_of(settings.topic)]
