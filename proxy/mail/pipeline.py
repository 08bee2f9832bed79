"""The proxy's mail pipeline: Xiu stores, Pi appends, then the sender is informed. Pure.

    request ──▶ batches ──▶ Xiu, by the first receiver ──▶ MsgIDs ──▶ Pi, by each receiver ──▶ answer
                   │              any number at a time                   in the writer's order
                   └── channels: one for each partition of Xiu, UIN % n; a batch goes on to Pi when it is the first in its channel

Storing has no order and may be repeated: what a lost Xiu leader did not answer goes to the next one. Appending has an order: a
refusal, a time-out or a lost Pi leader ends the streams of the writers that wait for it; each opens another one with a higher
generation and sends everything unconfirmed again. Pi takes each MsgID once, so two ordered streams of one writer keep their order
however they mix.

While Xiu is doubled, a partition that was split refuses the mail of users who have moved, with a code for that: their batches are
divided and go to its child, with the same SnowflakeIDs, in the same places of their channels.

Source: docs/architecture.md, "A mail is sent"; docs/doubling.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cluster.core.contract import END_OF_TURN, NEVER, EndOfTurn, EventTable, Tick
from pixiu import errors
from pixiu.errors import Refusal
from pixiu.placement.split import SplitPartitions
from pixiu.wire.levels import Level, Triple
from pixiu.wire.record import SIZE_FIELD
from proxy import mail_events as ev
from proxy.mail.batches import Batch, Part, Writer, batch_of_room, divide, parts_of, split, split_again
from proxy.mail.pauses import Pauses
from proxy.mail.requests import STALL_S, Link, Request, append_requests, store_requests, take_runs
from proxy.mail.results import DISK_FULL, NEXT_LEADER, PERMANENT, STALE_WRITER, inboxes_grew, results_of_each, why_not

MAX_WAITING_BYTES: Final = 256 << 20
"""Bytes of all writers. Policy: a writer that sends more is ended with OVERLOADED."""
MIN_SHARE_BYTES: Final = 32 << 20
"""Part of that for one partition of Xiu if there are many; an equal share if there are few. Policy: the same, for writers with mail
for that partition alone: one without a leader leaves capacity for the mail of the others."""
OWN_PART: Final = 4
"""The part of it that messages for sessions may have is one in this many. Policy: a further one is refused alone."""
ROOM_TIMEOUT_S: Final = 5.0
"""Time after which an unconfirmed message for sessions ends the stream of the proxy's own writer, seconds: by then its publisher
was refused, and what is still waited for is sent again."""
MAX_BATCH_RECORDS: Final = 16_384
"""Records in one batch of a writer. Policy: the stream is ended."""
PAUSE_S: Final = 0.1
"""Pause after a temporary refusal, seconds; longer if the store asks for it."""
MAX_PAUSE_S: Final = 5.0
"""Longest pause that a store may ask for, seconds."""
MOVED_PAUSE_S: Final = 0.01
"""Pause before mail that an unopened child of Xiu refused is sent again, by way of its parent, seconds."""
MOVED_SOON: Final = 50
"""Number of such pauses; then the cut takes longer than it should, and the pause is `PAUSE_S`."""
RETRY_MS: Final = 200
CLOSED_PAUSE_S: Final = 0.01
"""Pause before an unopened child of Pi is asked again, seconds: it opens once it has learned the last of what its parent took."""
TOO_MUCH_WAITS: Final = f"{MAX_WAITING_BYTES >> 20} MiB of mail wait in this proxy; send again later, or through another proxy"
CHILD_S: Final = 1.0
"""Time for which an unopened child is asked, before its parent is, seconds."""


@dataclass(slots=True)
class Counters:
    """Totals of the mail pipeline since the start."""

    mails_in: int = 0
    confirmed: int = 0
    refused: int = 0
    writers_ended: int = 0
    links_lost: int = 0


class MailCore:
    """Decides; see the module. `step` never raises on what comes from the network.

    Args:
        max_record_bytes: larger records are refused, header included.
        timeout_s: time after which unconfirmed mail ends its writer's stream, seconds.
        taken: True if this proxy takes mail.
    """

    def __init__(self, *, max_record_bytes: int, timeout_s: float, taken: bool = True) -> None:
        self._max_size = max_record_bytes - SIZE_FIELD
        self._timeout_s = timeout_s
        self._taken = taken
        self._xius, self._pis = 0, 0
        self._xiu_split, self._pi_split = SplitPartitions(), SplitPartitions()
        """Parents are split one by one before the layout shows it."""
        self.pauses = Pauses()
        self._closed_until: dict[int, float] = {}
        """Child of Pi that is not open → time until which it is asked again."""
        self._knows_stores = False
        """False before the first view of the cluster, when a process serves already."""
        self._writers: dict[int, Writer] = {}
        self._xiu_links: dict[int, Link[Batch]] = {}
        self._pi_links: dict[int, Link[Part]] = {}
        self._deadlines: deque[Batch] = deque()
        self._size = 0
        self._sizes: dict[int, int] = {}
        """Partition of Xiu → unconfirmed bytes that are, or will be, stored there."""
        self._left = 0
        """Batches given up since the queues were last cleared of them; some may still be queued."""
        self.triples: dict[ev.Store, Triple] = {}
        self._results: dict[int, list[ev.Result]] = {}
        """Stream → results of the present step."""
        self._touched: dict[int, set[ev.Store]] = {}
        self.counters = Counters()
        self._events: EventTable[ev.Effect] = EventTable()
        self._events.on(ev.WriterOpened, self._on_opened)
        self._events.on(ev.WriterClosed, self._on_closed)
        self._events.on(ev.MailReceived, self._on_mail)
        self._events.on(ev.RoomMailReceived, self._on_room_mail)
        self._events.on(ev.StoresChanged, self._on_stores)
        self._events.on(ev.LinkUp, self._on_up)
        self._events.on(ev.LinkDown, self._on_down)
        self._events.on(ev.Stored, self._on_stored)
        self._events.on(ev.Appended, self._on_appended)
        self._events.on(EndOfTurn, self._on_turn)
        self._events.on(Tick, self._on_tick)

    def step(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Take one event; `now` is monotonic seconds. Returns the effects, in order."""
        out = self._events.step(event, now)
        if not self._results:
            return out
        answers: dict[int, ev.Effect] = {}
        for stream, results in self._results.items():
            writer = self._writers.get(stream)
            triples = {store: self.triples[store] for store in self._touched.get(stream, ()) if store in self.triples}
            answers[stream] = ev.Answer(stream, results, triples, writer.size if writer is not None else 0)
        self._results, self._touched = {}, {}
        told: list[ev.Effect] = []
        for effect in out:  # a writer's results are reported before its end
            if isinstance(effect, ev.EndWriter) and effect.stream in answers:
                told.append(answers.pop(effect.stream))
            told.append(effect)
        return [*told, *answers.values()]

    def next_deadline(self) -> float:
        """Time at which a `Tick` is due, monotonic seconds; `NEVER` while no mail is in flight."""
        found = self._deadlines[0].deadline if self._deadlines else NEVER
        for links in (self._xiu_links, self._pi_links):
            for link in links.values():
                found = min(found, link.deadline)
        return found

    @property
    def under_way(self) -> int:
        """Number of batches that are not confirmed."""
        return sum(len(writer.batches) for writer in self._writers.values())

    @property
    def waiting_bytes(self) -> int:
        """Unconfirmed bytes of all writers."""
        return self._size

    @property
    def writers(self) -> int:
        """Number of open writers' streams."""
        return len(self._writers)

    # --- writers

    def _on_opened(self, event: ev.WriterOpened, now: float, out: list[ev.Effect]) -> None:
        refusal = ""
        if not self._taken and not event.own:
            refusal = "this proxy does not accept mail (proxy.kinds); use another one"
        elif not self._knows_stores:
            text = "this proxy has only just started and has not read the cluster yet; use another one, or retry"
            out.append(ev.EndWriter(event.stream, Refusal(errors.Unavailable.code, text, RETRY_MS)))
            return
        elif not self._xius or not self._pis:
            refusal = "this cluster keeps no mail: it has no Xiu or no Pi; `pixiu up --xius 1 --pis 1` has them"
        if refusal:
            out.append(ev.EndWriter(event.stream, Refusal(errors.NotServed.code, refusal)))
            return
        self._writers[event.stream] = Writer(event.stream, event.worker, event.generation, self._xius)

    def _on_closed(self, event: ev.WriterClosed, now: float, out: list[ev.Effect]) -> None:
        writer = self._writers.pop(event.stream, None)
        if writer is not None:
            self._forget([writer])

    def _end(self, writers: Iterable[Writer], why: Refusal, out: list[ev.Effect]) -> None:
        """End writers' streams: notify them, and forget their mail in flight."""
        ended = [writer for writer in dict.fromkeys(writers) if not writer.ended]
        for writer in ended:
            self.counters.writers_ended += 1
            del self._writers[writer.stream]
            for batch in writer.batches:
                if batch.many and batch.stored and batch.open:
                    text = f"some inboxes may not have it yet; send it again with the same SnowflakeID ({why.code}: {why.text})"
                    unknown = Refusal(errors.OutcomeUnknown.code, text)
                    found = ev.refused(batch.positions[0], unknown, batch.msg_ids, sorted(batch.open))
                    self._results.setdefault(writer.stream, []).append(found)
            out.append(ev.EndWriter(writer.stream, why))
        self._forget(ended)

    def _forget(self, writers: list[Writer]) -> None:
        if not writers:
            return
        for writer in writers:
            writer.ended = True
            self._size -= writer.size
            self._left += len(writer.batches)
            for batch in writer.batches:
                self._sizes[batch.partition] -= batch.size
                batch.finish()
            writer.batches, writer.channels, writer.size = {}, {}, 0
        if 2 * self._left < sum(len(link.queue) for link in self._links()):
            return  # otherwise each of many writers that end would cost a walk over everything that waits
        self._left = 0
        for xiu in self._xiu_links.values():
            xiu.queue = deque(batch for batch in xiu.queue if not batch.done)
        for pi in self._pi_links.values():
            pi.queue = deque(part for part in pi.queue if not part.batch.done)

    def _on_mail(self, event: ev.MailReceived, now: float, out: list[ev.Effect]) -> None:
        writer = self._writers.get(event.stream)
        if writer is None:
            return
        wrong = ""
        if event.position != writer.expected:
            wrong = f"positions must be consecutive: {writer.expected} was expected, {event.position} came"
        elif event.count > MAX_BATCH_RECORDS:
            wrong = f"a batch has at most {MAX_BATCH_RECORDS} records"
        if wrong:
            self._end([writer], Refusal(errors.InvalidArgument.code, wrong), out)
        elif self._size + len(event.data) > MAX_WAITING_BYTES:
            self._end([writer], Refusal(errors.Overloaded.code, TOO_MUCH_WAITS, RETRY_MS), out)
        else:
            writer.expected += event.count
            self.counters.mails_in += event.count
            if not writer.batches:
                writer.xius = self._xius
            made = split(writer, event, self._xiu_split.of, self._max_size, now + self._timeout_s)
            if made is None:
                text = f"a batch of {len(event.data)} bytes is not {event.count} records end to end"
                self._end([writer], Refusal(errors.MalformedData.code, text), out)
                return
            batches, refused = made
            if refused:
                self._answer(writer, refused)
            for batch in batches:
                if text := self._no_space_for(batch):
                    self._end([writer], Refusal(errors.Overloaded.code, text, RETRY_MS), out)
                    return
                self._start(batch)

    def _on_room_mail(self, event: ev.RoomMailReceived, now: float, out: list[ev.Effect]) -> None:
        """Take messages to rooms. What finds no space is refused alone: its writer is that of all rooms."""
        writer = self._writers.get(event.stream)
        if writer is None:
            return
        self.counters.mails_in += len(event.mails)
        writer.expected = event.position + len(event.mails)
        if not writer.batches:
            writer.xius = self._xius
        deadline, own_limit = now + min(self._timeout_s, ROOM_TIMEOUT_S), MAX_WAITING_BYTES // OWN_PART
        for position, mail in enumerate(event.mails, event.position):
            batch = batch_of_room(writer, position, mail, self._xiu_split.of(mail.room), deadline)
            full = self._size + batch.size > MAX_WAITING_BYTES or writer.size + batch.size > own_limit
            text = TOO_MUCH_WAITS if full else self._no_space_for(batch)
            if text:
                self._answer(writer, [ev.refused(position, Refusal(errors.Overloaded.code, text, RETRY_MS))])
            else:
                self._start(batch)

    def _no_space_for(self, batch: Batch) -> str:
        """Text if too much waits for the batch's partition of Xiu; empty: there is space."""
        if self._sizes.get(batch.partition, 0) + batch.size <= self._share:
            return ""
        waits = f"{self._share >> 20} MiB of mail for Xiu partition {batch.partition} wait in this proxy"
        return f"{waits}; send again later, or through another proxy"

    @property
    def _share(self) -> int:
        """Bytes that may wait for one partition of Xiu."""
        return max(min(MIN_SHARE_BYTES, MAX_WAITING_BYTES), MAX_WAITING_BYTES // self._xius)

    def _start(self, batch: Batch) -> None:
        writer = batch.writer
        writer.size += batch.size
        self._size += batch.size
        self._sizes[batch.partition] = self._sizes.get(batch.partition, 0) + batch.size
        writer.batches[batch] = None
        for channel in batch.channels:
            writer.channels.setdefault(channel, deque()).append(batch)
        self._deadlines.append(batch)
        self._xiu(batch.partition).queue.append(batch)

    def _answer(self, writer: Writer, results: list[ev.Result], *stores: ev.Store) -> None:
        for result in results:
            if result.code:
                self.counters.refused += result.count
            else:
                self.counters.confirmed += result.count
        self._results.setdefault(writer.stream, []).extend(results)
        self._touched.setdefault(writer.stream, set()).update(stores)

    def _finish(self, batch: Batch) -> None:
        """Remove a batch that is answered completely."""
        batch.finish()
        writer = batch.writer
        if writer.batches.pop(batch, batch) is None:
            writer.size -= batch.size
            self._size -= batch.size
            self._sizes[batch.partition] -= batch.size

    # --- links

    def _xiu(self, partition: int) -> Link[Batch]:
        link = self._xiu_links.get(partition)
        if link is None:
            link = self._xiu_links[partition] = Link(ev.Store(False, partition))
        return link

    def _pi(self, partition: int) -> Link[Part]:
        link = self._pi_links.get(partition)
        if link is None:
            link = self._pi_links[partition] = Link(ev.Store(True, partition))
        return link

    def _links(self) -> list[Link[Any]]:
        return [*self._xiu_links.values(), *self._pi_links.values()]

    def _link(self, store: ev.Store) -> Link[Any]:
        return self._pi(store.partition) if store.pi else self._xiu(store.partition)

    def _on_stores(self, event: ev.StoresChanged, now: float, out: list[ev.Effect]) -> None:
        self._knows_stores = True
        xius, pis, self._xius, self._pis = self._xius, self._pis, event.xius, event.pis
        self._xiu_split.set_count(max(event.xius, 1))
        for role, was, n, following in (("xiu", xius, event.xius, event.next_xius), ("pi", pis, event.pis, event.next_pis)):
            if following > n:
                self.pauses.begun(role, n)
            elif was == n:
                self.pauses.taken_back(role)
        follows_xius = event.xius == xius or event.xius > xius > 0 == event.xius % xius
        if not follows_xius or (event.pis != pis and not event.pis == 2 * pis > 0):
            self._pi_split = SplitPartitions(max(event.pis, 1))
            self._end(list(self._writers.values()), Refusal(errors.StaleStream.code, "the cluster's layout changed"), out)
            return
        if event.xius != xius:
            for link in self._xiu_links.values():
                link.bounces = 0
            self._reroute_xius([partition for partition, link in self._xiu_links.items() if link.queue])
        if event.pis != pis:
            self._double_pis(out)
        for partition in range(event.xius, event.next_xius):
            self._get_ready(self._xiu_links.get(partition - event.xius), self._xiu(partition), out)
        for partition in range(event.pis, event.next_pis):
            self._get_ready(self._pi_links.get(partition - event.pis), self._pi(partition), out)

    @staticmethod
    def _get_ready(parent: Link[Any] | None, child: Link[Any], out: list[ev.Effect]) -> None:
        """Open the link to a partition that will take over a part of its parent's users, before the cut."""
        if parent is not None and parent.epoch >= 0 > child.epoch:
            child.epoch = 0
            out.append(ev.Connect(child.store))

    def _hurry(self, child: Link[Any], out: list[ev.Effect]) -> None:
        """Hurry the link to a child whose parent reported that it was split."""
        if child.epoch >= 0 and not child.number:
            out.append(ev.Hurry(child.store))

    def _double_pis(self, out: list[ev.Effect]) -> None:
        """Reroute after the layout shows what most parents reported before: they were split."""
        known = set(self._pi_split.all())
        self._pi_split.set_count(self._pis)
        for partition, link in sorted(self._pi_links.items()):
            if partition < self._pis // 2 and partition + self._pis // 2 not in known:
                self._reroute_pi(link, "the cluster's layout changed", out)

    def _reroute_pi(self, link: Link[Part], text: str, out: list[ev.Effect]) -> None:
        """Move everything that waits for a Pi to the Pi that serves it now, in order. What was in flight is sent again, because its
        outcome is unknown; each inbox takes a MsgID once, and a child has learned what its parent took."""
        if link.number and link.in_flight:
            out.append(ev.Disconnect(link.store, link.number, text, again=True))
            waiting = [part for request in link.drop() for part in request.waiting]
        else:
            waiting = []
        waiting += link.queue
        link.queue.clear()
        own: list[Part] = []
        for part in waiting:
            if part.batch.done:
                continue
            for partition, found in split_again(part, self._pi_split).items():
                if partition == link.store.partition:
                    own.append(found)
                else:
                    self._pi(partition).queue.append(found)
        link.queue.extend(own)

    def _on_up(self, event: ev.LinkUp, now: float, out: list[ev.Effect]) -> None:
        link = self._link(event.store)
        link.number, link.epoch, link.progress_at, link.trouble = event.link, event.epoch, now, None

    def _on_down(self, event: ev.LinkDown, now: float, out: list[ev.Effect]) -> None:
        link = self._link(event.store)
        if event.link == link.number:
            link.trouble = Refusal(errors.Unavailable.code, event.text)
            self._dropped(link, event.text, out)

    def _leave(self, link: Link[Any], text: str, out: list[ev.Effect]) -> None:
        """Give up a link that is of no use any more."""
        if link.number:
            out.append(ev.Disconnect(link.store, link.number, text))
            self._dropped(link, text, out)

    def _dropped(self, link: Link[Any], text: str, out: list[ev.Effect]) -> None:
        if link.number:
            self.counters.links_lost += 1
        lost = link.drop()
        if link.store.pi:
            writers = [part.batch.writer for request in lost for part in request.waiting]
            name = f"pi partition {link.store.partition}"
            text = f"{name}: {text}; the outcome of what it did not confirm is unknown"
            self._end(writers, Refusal(errors.StaleStream.code, text), out)
        else:
            self._again([batch for request in lost for batch in request.waiting if not batch.done])

    def _on_turn(self, event: EndOfTurn, now: float, out: list[ev.Effect]) -> None:
        """Send the input of one turn together."""
        while self._deadlines and self._deadlines[0].done:
            self._deadlines.popleft()
        for xiu in self._xiu_links.values():
            if xiu.queue and self._ready(xiu, now, out):
                out += store_requests(xiu, now)
        for pi in self._pi_links.values():
            if pi.queue and self._ready(pi, now, out):
                out += append_requests(pi, now)

    @staticmethod
    def _ready(link: Link[Any], now: float, out: list[ev.Effect]) -> bool:
        if link.epoch < 0:
            link.epoch = 0
            out.append(ev.Connect(link.store))
        return bool(link.number) and now >= link.not_before

    # --- Xiu's answers

    def _on_stored(self, event: ev.Stored, now: float, out: list[ev.Effect]) -> None:
        link = self._xiu(event.partition)
        if event.link != link.number:
            return
        link.progress_at = now
        self.triples[link.store] = event.triple
        stale = event.triple.epoch != link.epoch
        for request in take_runs(link, event.runs):
            stale = self._stored(link, request, event.copies, now, out) or stale
        if stale:
            self._leave(link, link.trouble.text if link.trouble else "the leader changed", out)

    def _stored(self, link: Link[Batch], request: Request[Batch], copies: int, now: float, out: list[ev.Effect]) -> bool:
        """Take the complete answer to a request. Returns True if this is not the leader any more."""
        if request.retry is not None:
            link.trouble = request.retry
            moved = request.retry.code == errors.WrongPartition.code and self._moved_xiu(link, request, now, out)
            self._again([batch for batch in request.waiting if not batch.done])
            if not moved:
                link.not_before = now + max(PAUSE_S, min(request.retry.retry_after_ms / 1000, MAX_PAUSE_S))
            return not moved and request.retry.code in NEXT_LEADER
        self.pauses.confirmed(link.store, now)
        at = 0
        for batch in request.waiting:
            count = batch.count
            if not batch.done:
                batch.msg_ids = request.found[at : at + count]
                if request.codes:
                    batch.codes = {index: request.codes[at + index] for index in range(count) if at + index in request.codes}
                batch.copies, batch.stored = copies, True
                self._advance(batch.writer, batch.channels, out)
            at += count
        return False

    def _moved_xiu(self, link: Link[Batch], request: Request[Batch], now: float, out: list[ev.Effect]) -> bool:
        """Handle a refusal by a partition of Xiu that does not serve the users. Returns True if the right one is known now."""
        partition, split = link.store.partition, self._xiu_split
        if split.learn(partition, request.partitions):
            self._hurry(self._xiu(partition + split.count), out)
            self.pauses.refused(ev.Store(False, partition + split.count), split.count, now)
            self._reroute_xius([partition])
        elif request.partitions == split.count <= partition:
            split.forget(partition)
            self._reroute_xius([partition])
            parent = self._xiu(partition % split.count)
            parent.bounces += 1
            pause = MOVED_PAUSE_S if parent.bounces <= MOVED_SOON else PAUSE_S
            parent.not_before = max(parent.not_before, now + pause)
        batches = (batch for batch in request.waiting if not batch.done)
        return any(split.of(key) != partition for batch in batches for key in batch.keys)

    def _reroute_xius(self, partitions: Iterable[int]) -> None:
        """Move what waits for these partitions to those that store it now."""
        for partition in partitions:
            queue = self._xiu(partition).queue
            waiting = [batch for batch in queue if not batch.done]
            queue.clear()
            self._again(waiting)

    def _again(self, batches: list[Batch]) -> None:
        """Send batches that were not stored again, before those that wait, to the partitions that store them now."""
        wanted: dict[int, list[Batch]] = {}
        divided = False
        for batch in batches:
            self._sizes[batch.partition] -= batch.size
            batch.writer.size -= batch.size
            self._size -= batch.size
            parts = divide(batch, self._xiu_split.of)
            for part in parts:
                self._sizes[part.partition] = self._sizes.get(part.partition, 0) + part.size
                part.writer.size += part.size
                self._size += part.size
                wanted.setdefault(part.partition, []).append(part)
            if len(parts) > 1:
                self._place(batch, parts[1:])
                divided = True
        if divided:
            self._deadlines = deque(sorted(self._deadlines, key=lambda batch: batch.deadline))
        for partition, parts in wanted.items():
            self._xiu(partition).queue.extendleft(reversed(parts))

    def _place(self, batch: Batch, parts: list[Batch]) -> None:
        """Put the parts taken out of a batch right after it."""
        writer = batch.writer
        for channel in batch.channels:
            queue = writer.channels[channel]
            at = queue.index(batch) + 1
            for offset, part in enumerate(parts):
                queue.insert(at + offset, part)
        writer.batches.update(dict.fromkeys(parts))
        self._deadlines.extend(parts)

    def _advance(self, writer: Writer, channels: Iterable[int], out: list[ev.Effect]) -> None:
        """Let stored batches go on to Pi that are the first in each of their channels."""
        todo = list(channels)
        while todo:
            queue = writer.channels.get(todo.pop())
            while queue and queue[0].stored:
                batch = queue[0]
                if any(writer.channels[channel][0] is not batch for channel in batch.channels):
                    break
                for channel in batch.channels:
                    writer.channels[channel].popleft()
                if len(batch.channels) > 1:
                    todo.extend(batch.channels)
                self._release(batch, out)

    def _release(self, batch: Batch, out: list[ev.Effect]) -> None:
        if batch.codes:
            refused = [ev.refused(batch.positions[index], why) for index, why in sorted(batch.codes.items())]
            self._answer(batch.writer, refused, ev.Store(False, batch.partition))
        parts = parts_of(batch, self._pi_split)
        batch.pending = len(parts)
        if not parts:
            self._finish(batch)
        for partition, part in parts.items():
            self._pi(partition).queue.append(part)

    # --- Pi's answers

    def _on_appended(self, event: ev.Appended, now: float, out: list[ev.Effect]) -> None:
        link = self._pi(event.partition)
        if event.link != link.number:
            return
        link.progress_at = now
        self.triples[link.store] = event.triple
        stale = event.triple.epoch != link.epoch
        why = event.refusal
        if why is not None and why.code == errors.WrongPartition.code and event.request in link.in_flight:
            self._moved_pi(link, event, why, now, out)
            return
        request = link.in_flight.pop(event.request, None)
        if request is None:
            pass
        elif why is not None:
            stale = self._append_refused(link, request, why, out) or stale
        elif stale and not event.results:
            # It was answered before it was applied, and will be refused then: it names the epoch before.
            text = f"pi partition {event.partition}: the leader changed"
            self._end([part.batch.writer for part in request.waiting], Refusal(errors.StaleStream.code, text), out)
        else:
            self._closed_until.pop(event.partition, None)
            self.pauses.confirmed(link.store, now)
            self._appended(link, request, event, out)
        if stale:
            self._leave(link, why.text if why else "the leader changed", out)

    def _moved_pi(self, link: Link[Part], event: ev.Appended, why: Refusal, now: float, out: list[ev.Effect]) -> None:
        """Handle a Pi that does not serve some of the users, or not yet: nothing of the request was appended. A parent that was
        split reports so; an unopened child is asked again, and after a while its parent, whose cut may be undone."""
        partition, link.trouble = event.partition, why
        if partition < self._pi_split.count:
            if self._pi_split.learn(partition, event.partitions):
                child = ev.Store(True, partition + self._pi_split.count)
                self._hurry(self._pi(child.partition), out)
                self.pauses.refused(child, self._pi_split.count, now)
            else:
                link.not_before = now + CLOSED_PAUSE_S
        elif self._closed_until.setdefault(partition, now + CHILD_S) <= now:
            del self._closed_until[partition]
            self._pi_split.forget(partition)
        else:
            link.not_before = now + CLOSED_PAUSE_S
        self._reroute_pi(link, why.text, out)

    def _append_refused(self, link: Link[Part], request: Request[Part], why: Refusal, out: list[ev.Effect]) -> bool:
        """Handle a request of which nothing was appended, or nobody knows. Returns True if this is not the leader any more."""
        link.trouble = why
        named = why._replace(text=f"pi partition {link.store.partition}: {why.text}")
        if why.code in PERMANENT:
            for part in request.waiting:
                if not part.batch.done and not part.batch.many:
                    positions = dict.fromkeys(part.batch.positions[index] for index in part.indexes)
                    results = [ev.refused(position, named) for position in positions]
                    self._answer(part.batch.writer, results, link.store)
        # Pi also refuses what follows of the same streams: nothing late may overtake.
        writers = [part.batch.writer for part in request.waiting]
        self._end(writers, named._replace(retry_after_ms=why.retry_after_ms or RETRY_MS), out)
        return why.code in NEXT_LEADER

    def _appended(self, link: Link[Part], request: Request[Part], event: ev.Appended, out: list[ev.Effect]) -> None:
        at = 0
        for part in request.waiting:
            batch, count = part.batch, len(part.uins)
            results = event.results[at : at + count] if event.results else ()
            at += count
            if batch.done:
                continue
            if STALE_WRITER in results or (event.results and len(results) < count):
                text = "a newer stream of this writer is open, or the leader of Pi changed"
                self._end([batch.writer], Refusal(errors.StaleWriter.code, text), out)
                continue
            copies = min(batch.copies, event.copies) if batch.level is Level.REPLICATED else 1
            batch.pending -= 1
            if batch.many:
                self._appended_to_many(link, part, results, copies)
            else:
                told = results_of_each(part, results, copies)
                self._answer(batch.writer, told, link.store, ev.Store(False, batch.partition))
            out.append(inboxes_grew(part, results))
            if not batch.pending:
                self._finish(batch)

    def _appended_to_many(self, link: Link[Part], part: Part, results: Sequence[int], copies: int) -> None:
        batch = part.batch
        batch.copies = min(batch.copies, copies) if batch.level is Level.REPLICATED else 1
        for at, uin in enumerate(part.uins):
            if not results or results[at] > 0:
                batch.open.discard(uin)
            elif batch.refused is None or results[at] == DISK_FULL:  # the sender may try that again; a full inbox stays so
                batch.refused = why_not(results[at])
        if batch.pending:
            return
        stores = link.store, ev.Store(False, batch.partition)
        if batch.refused is not None:
            result = ev.refused(batch.positions[0], batch.refused, batch.msg_ids, sorted(batch.open))
        else:
            result = ev.Result(batch.positions[0], 1, batch.copies, batch.msg_ids)
        self._answer(batch.writer, [result], *stores)

    # --- time

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        while self._deadlines and (self._deadlines[0].done or self._deadlines[0].deadline <= now):
            batch = self._deadlines.popleft()
            if not batch.done:
                store = ev.Store(True, self._pi_split.of(batch.uins[0])) if batch.stored else ev.Store(False, batch.partition)
                why = self._link(store).trouble or Refusal(errors.Unavailable.code, "it does not answer")
                name = f"{store.role} partition {store.partition}"
                text = f"{name} did not confirm within {self._timeout_s:g} s ({why.code}: {why.text})"
                code = why.code if why.code not in NEXT_LEADER | PERMANENT else errors.Unavailable.code
                self._end([batch.writer], Refusal(code, text, why.retry_after_ms or RETRY_MS), out)
        for link in self._links():
            if link.stalls(now):
                self._leave(link, f"no answer for {STALL_S:g} s", out)
        self._on_turn(END_OF_TURN, now, out)
