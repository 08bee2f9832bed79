"""The proxy's mail pipeline: Xiu stores, Pi appends, then the sender is told. Pure.

    batch ──▶ parcels ──▶ Xiu, by the first receiver ──▶ MsgIDs ──▶ Pi, by each receiver ──▶ answer
                │              any number at a time                   in the writer's order
                └── channels: one for each partition of Xiu, UIN % n; a parcel goes on to Pi when it is the first in its channel

Storing has no order and may be repeated: what a lost Xiu leader did not answer goes to the next one. Appending has an order: a
refusal, a time-out or a lost Pi leader ends the streams of the writers that wait for it; each opens another one with a higher
generation and sends everything unconfirmed again. Pi takes each MsgID once, so two orderly streams of one writer, however they
mix, make one order.

Source: DESIGN section 9, "Mail".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pixiu import errors
from pixiu.wire.inbox_operations import encode_appends, encode_fanout
from pixiu.wire.levels import Level, Triple
from pixiu.wire.record import SIZE_FIELD
from proxy.mail_batches import PERMANENT, split, take_run, why_not
from proxy.mail_events import (
    Answer,
    Appended,
    Connect,
    Disconnect,
    Effect,
    EndWriter,
    Event,
    InboxesGrew,
    LinkDown,
    LinkUp,
    MailReceived,
    Result,
    SendAppend,
    SendStore,
    Store,
    Stored,
    StoresChanged,
    Tick,
    TurnEnded,
    WriterClosed,
    WriterOpened,
)
from proxy.mail_state import Link, Parcel, Part, Request, Writer

MAX_WAITING_BYTES: Final = 256 << 20
"""Of all writers. Policy: a writer that sends more is ended with OVERLOADED."""
STORE_BYTES: Final = 256 << 10
STORE_RECORDS: Final = 4096
"""Of one request to a Xiu; or one parcel."""
APPEND_ITEMS: Final = 4096
"""Of one request to a Pi; or one part, which is at most as large as a batch."""
MAX_BATCH_RECORDS: Final = 16_384
"""Of one batch of a writer. Policy: the stream is ended."""
MAX_REQUESTS: Final = 4
"""To one store without an answer. Policy: what comes meanwhile waits and leaves together."""
STALL_S: Final = 10.0
"""A store that owes an answer and says nothing for so long is left for the next leader."""
PAUSE_S: Final = 0.1
"""After a refusal that passes."""
RETRY_MS: Final = 200
NEXT_LEADER: Final = frozenset({
    errors.NotLeader.code, errors.StaleStream.code, errors.Draining.code, errors.OutcomeUnknown.code, errors.WrongPartition.code,
})  # fmt: skip
STALE_WRITER: Final = -1


@dataclass(slots=True)
class Counters:
    """Since the start."""

    mails_in: int = 0
    confirmed: int = 0
    refused: int = 0
    writers_ended: int = 0
    links_lost: int = 0


class MailCore:
    """Decides; see the module. `step` never raises on what comes from the network.

    Args:
        max_record_bytes: larger records are refused, header included.
        timeout_s: what is not confirmed for so long ends its writer's stream.
        taken: whether this proxy takes mail.
    """

    def __init__(self, *, max_record_bytes: int, timeout_s: float, taken: bool = True) -> None:
        self._max_size = max_record_bytes - SIZE_FIELD
        self._timeout_s = timeout_s
        self._taken = taken
        self._xius, self._pis = 0, 0
        self._knows_stores = False
        """A process serves from before its first view of the cluster."""
        self._writers: dict[int, Writer] = {}
        self._xiu_links: dict[int, Link[Parcel]] = {}
        self._pi_links: dict[int, Link[Part]] = {}
        self._deadlines: deque[Parcel] = deque()
        self._size = 0
        self.triples: dict[Store, Triple] = {}
        self._results: dict[int, list[Result]] = {}
        """By stream, of the step under way."""
        self._touched: dict[int, set[Store]] = {}
        self.counters = Counters()
        self._handlers: dict[type[Any], Callable[[Any, float, list[Effect]], None]] = {
            WriterOpened: self._on_opened,
            WriterClosed: self._on_closed,
            MailReceived: self._on_mail,
            StoresChanged: self._on_stores,
            LinkUp: self._on_up,
            LinkDown: self._on_down,
            Stored: self._on_stored,
            Appended: self._on_appended,
            TurnEnded: self._on_turn,
            Tick: self._on_tick,
        }

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; `now` is monotonic seconds. Returns what to do, in order."""
        out: list[Effect] = []
        self._handlers[type(event)](event, now, out)
        for stream, results in self._results.items():
            writer = self._writers.get(stream)
            triples = {store: self.triples[store] for store in self._touched.get(stream, ()) if store in self.triples}
            # What was found out about a writer is told before its end.
            answer = Answer(stream, results, triples, writer.size if writer is not None else 0)
            ends = [at for at, effect in enumerate(out) if isinstance(effect, EndWriter) and effect.stream == stream]
            out.insert(ends[0] if ends else len(out), answer)
        self._results, self._touched = {}, {}
        return out

    @property
    def under_way(self) -> int:
        """Parcels that are not confirmed."""
        return sum(len(writer.parcels) for writer in self._writers.values())

    @property
    def waiting_bytes(self) -> int:
        """Of all writers."""
        return self._size

    @property
    def writers(self) -> int:
        """Streams."""
        return len(self._writers)

    # --- writers

    def _on_opened(self, event: WriterOpened, now: float, out: list[Effect]) -> None:
        refusal = ""
        if not self._taken:
            refusal = "this proxy does not take mail (proxy.kinds); use another one"
        elif not self._knows_stores:
            text = "this proxy has only just started and does not know the cluster yet; use another one, or come again"
            out.append(EndWriter(event.stream, errors.Unavailable.code, text, RETRY_MS))
            return
        elif not self._xius or not self._pis:
            refusal = "this cluster keeps no mail: it has no Xiu or no Pi; `pixiu up --xius 1 --pis 1` has them"
        if refusal:
            out.append(EndWriter(event.stream, errors.NotServed.code, refusal, 0))
            return
        self._writers[event.stream] = Writer(event.stream, event.worker, event.generation)

    def _on_closed(self, event: WriterClosed, now: float, out: list[Effect]) -> None:
        writer = self._writers.pop(event.stream, None)
        if writer is not None:
            self._forget([writer])

    def _end(self, writers: Iterable[Writer], code: str, text: str, out: list[Effect], retry_ms: int = 0) -> None:
        """Their streams are over; what is under way of them is forgotten, and they are told."""
        ended = [writer for writer in dict.fromkeys(writers) if not writer.ended]
        for writer in ended:
            self.counters.writers_ended += 1
            del self._writers[writer.stream]
            for parcel in writer.parcels:
                if parcel.many and parcel.stored and parcel.open:
                    unknown = f"some inboxes may not have it yet; send it again with the same SnowflakeID ({code}: {text})"
                    found = Result(
                        parcel.positions[0], 1, 0, parcel.msg_ids, errors.OutcomeUnknown.code, unknown, sorted(parcel.open)
                    )
                    self._results.setdefault(writer.stream, []).append(found)
            out.append(EndWriter(writer.stream, code, text, retry_ms))
        self._forget(ended)

    def _forget(self, writers: list[Writer]) -> None:
        if not writers:
            return
        for writer in writers:
            writer.ended = True
            self._size -= writer.size
            for parcel in writer.parcels:
                parcel.finish()
            writer.parcels, writer.channels, writer.size = {}, {}, 0
        for xiu in self._xiu_links.values():
            xiu.queue = deque(parcel for parcel in xiu.queue if not parcel.done)
        for pi in self._pi_links.values():
            pi.queue = deque(part for part in pi.queue if not part.parcel.done)

    def _on_mail(self, event: MailReceived, now: float, out: list[Effect]) -> None:
        writer = self._writers.get(event.stream)
        if writer is None:
            return
        wrong = ""
        if event.position != writer.expected:
            wrong = f"positions are dense: {writer.expected} was expected, {event.position} came"
        elif event.count > MAX_BATCH_RECORDS:
            wrong = f"a batch has at most {MAX_BATCH_RECORDS} records"
        if wrong:
            self._end([writer], errors.InvalidArgument.code, wrong, out)
        elif self._size + len(event.data) > MAX_WAITING_BYTES:
            text = f"{MAX_WAITING_BYTES >> 20} MiB of mail wait in this proxy; send again later, or to another one"
            self._end([writer], errors.Overloaded.code, text, out, RETRY_MS)
        else:
            writer.expected += event.count
            self.counters.mails_in += event.count
            made = split(writer, event, self._xius, self._max_size, now + self._timeout_s)
            if made is None:
                text = f"a batch of {len(event.data)} bytes is not {event.count} records end to end"
                self._end([writer], errors.MalformedData.code, text, out)
                return
            parcels, refused = made
            if refused:
                self._answer(writer, refused)
            for parcel in parcels:
                self._start(parcel)

    def _start(self, parcel: Parcel) -> None:
        writer = parcel.writer
        writer.size += parcel.size
        self._size += parcel.size
        writer.parcels[parcel] = None
        for channel in parcel.channels:
            writer.channels.setdefault(channel, deque()).append(parcel)
        self._deadlines.append(parcel)
        self._xiu(parcel.partition).queue.append(parcel)

    def _answer(self, writer: Writer, results: list[Result], *stores: Store) -> None:
        for result in results:
            if result.code:
                self.counters.refused += result.count
            else:
                self.counters.confirmed += result.count
        self._results.setdefault(writer.stream, []).extend(results)
        self._touched.setdefault(writer.stream, set()).update(stores)

    def _finish(self, parcel: Parcel) -> None:
        """All of it is answered."""
        parcel.finish()
        writer = parcel.writer
        if writer.parcels.pop(parcel, parcel) is None:
            writer.size -= parcel.size
            self._size -= parcel.size

    # --- links

    def _xiu(self, partition: int) -> Link[Parcel]:
        link = self._xiu_links.get(partition)
        if link is None:
            link = self._xiu_links[partition] = Link(Store(False, partition), epoch=-1)
        return link

    def _pi(self, partition: int) -> Link[Part]:
        link = self._pi_links.get(partition)
        if link is None:
            link = self._pi_links[partition] = Link(Store(True, partition), epoch=-1)
        return link

    def _link(self, store: Store) -> Link[Any]:
        return self._pi(store.partition) if store.pi else self._xiu(store.partition)

    def _on_stores(self, event: StoresChanged, now: float, out: list[Effect]) -> None:
        self._knows_stores = True
        if (event.xius, event.pis) == (self._xius, self._pis):
            return
        self._xius, self._pis = event.xius, event.pis
        self._end(list(self._writers.values()), errors.StaleStream.code, "the cluster's layout changed", out)

    def _on_up(self, event: LinkUp, now: float, out: list[Effect]) -> None:
        link = self._link(event.store)
        link.number, link.epoch, link.progress_at, link.trouble = event.link, event.epoch, now, None

    def _on_down(self, event: LinkDown, now: float, out: list[Effect]) -> None:
        link = self._link(event.store)
        if event.link == link.number:
            link.trouble = (errors.Unavailable.code, event.text)
            self._dropped(link, event.text, out)

    def _leave(self, link: Link[Any], text: str, out: list[Effect]) -> None:
        """A link is of no use any more."""
        if link.number:
            out.append(Disconnect(link.store, link.number, text))
            self._dropped(link, text, out)

    def _dropped(self, link: Link[Any], text: str, out: list[Effect]) -> None:
        if link.number:
            self.counters.links_lost += 1
        lost = link.drop()
        if link.store.pi:
            writers = [part.parcel.writer for request in lost for part in request.waiting]
            name = f"pi partition {link.store.partition}"
            self._end(writers, errors.StaleStream.code, f"{name}: {text}; what it did not confirm is unknown", out)
        else:
            parcels = [parcel for request in lost for parcel in request.waiting if not parcel.done]
            link.queue.extendleft(reversed(parcels))

    def _on_turn(self, event: TurnEnded, now: float, out: list[Effect]) -> None:
        for xiu in self._xiu_links.values():
            if xiu.queue and self._ready(xiu, now, out):
                self._store(xiu, now, out)
        for pi in self._pi_links.values():
            if pi.queue and self._ready(pi, now, out):
                self._append(pi, now, out)

    @staticmethod
    def _ready(link: Link[Any], now: float, out: list[Effect]) -> bool:
        if link.epoch < 0:
            link.epoch = 0
            out.append(Connect(link.store))
        return bool(link.number) and now >= link.not_before

    def _store(self, link: Link[Parcel], now: float, out: list[Effect]) -> None:
        while link.queue and len(link.in_flight) < MAX_REQUESTS:
            parcels = [link.queue.popleft()]
            size, count, level = parcels[0].size, parcels[0].count, parcels[0].level
            while link.queue and link.queue[0].level == level:
                after = link.queue[0]
                if size + after.size > STORE_BYTES or count + after.count > STORE_RECORDS:
                    break
                size, count = size + after.size, count + after.count
                parcels.append(link.queue.popleft())
            position = link.next_number
            link.next_number += count
            if not link.in_flight:
                link.progress_at = now
            link.in_flight[position] = Request(parcels, size, count, count, [0] * count)
            link.in_flight_bytes += size
            data = parcels[0].data if len(parcels) == 1 else b"".join(parcel.data for parcel in parcels)
            out.append(SendStore(link.store.partition, link.number, position, data, count, level, link.epoch))

    def _append(self, link: Link[Part], now: float, out: list[Effect]) -> None:
        while link.queue and len(link.in_flight) < MAX_REQUESTS:
            parts = [link.queue.popleft()]
            level, items = parts[0].parcel.level, len(parts[0].uins)
            while link.queue and link.queue[0].parcel.level == level and items + len(link.queue[0].uins) <= APPEND_ITEMS:
                items += len(link.queue[0].uins)
                parts.append(link.queue.popleft())
            operations: list[bytes] = []
            for part in parts:
                parcel, writer = part.parcel, part.parcel.writer
                if parcel.many:
                    operation = encode_fanout(writer.worker, writer.generation, link.epoch, parcel.msg_ids[0], part.uins)
                else:
                    msg_ids = [parcel.msg_ids[index] for index in part.indexes]
                    operation = encode_appends(writer.worker, writer.generation, link.epoch, msg_ids, part.uins)
                operations.append(operation)
            number = link.next_number
            link.next_number += 1
            if not link.in_flight:
                link.progress_at = now
            body = b"".join(operations)
            link.in_flight[number] = Request(parts, len(body), items)
            link.in_flight_bytes += len(body)
            out.append(SendAppend(link.store.partition, link.number, number, body, level))

    # --- Xiu's answers

    def _on_stored(self, event: Stored, now: float, out: list[Effect]) -> None:
        link = self._xiu(event.partition)
        if event.link != link.number:
            return
        link.progress_at = now
        self.triples[link.store] = event.triple
        stale = event.triple.epoch != link.epoch
        starts = list(link.in_flight)
        current = 0
        answered: list[int] = []
        for run in event.runs:
            while current < len(starts) and not 0 <= run.position - starts[current] < link.in_flight[starts[current]].count:
                current += 1
            if current == len(starts):  # levels may be answered out of order: look again from the first one
                current = next((i for i, s in enumerate(starts) if 0 <= run.position - s < link.in_flight[s].count), -1)
            if current < 0:
                current = 0
                continue
            request = link.in_flight[starts[current]]
            take_run(request, run, run.position - starts[current], event.partition)
            if request.remaining <= 0:
                answered.append(starts[current])
        for start in answered:
            finished = link.finished(start)
            if finished is not None:
                stale = self._stored(link, finished, event.copies, now, out) or stale
        if stale:
            self._leave(link, link.trouble[1] if link.trouble else "the leader changed", out)

    def _stored(self, link: Link[Parcel], request: Request[Parcel], copies: int, now: float, out: list[Effect]) -> bool:
        """A request is answered whole. True: this is not the leader any more."""
        if request.retry is not None:
            link.trouble = request.retry
            link.queue.extendleft(reversed([parcel for parcel in request.waiting if not parcel.done]))
            link.not_before = now + PAUSE_S
            return request.retry[0] in NEXT_LEADER
        at = 0
        for parcel in request.waiting:
            count = parcel.count
            if not parcel.done:
                parcel.msg_ids = request.found[at : at + count]
                if request.codes:
                    parcel.codes = {index: request.codes[at + index] for index in range(count) if at + index in request.codes}
                parcel.copies, parcel.stored = copies, True
                self._advance(parcel.writer, parcel.channels, out)
            at += count
        return False

    def _advance(self, writer: Writer, channels: Iterable[int], out: list[Effect]) -> None:
        """Let go on to Pi what is stored and the first in each of its channels."""
        todo = list(channels)
        while todo:
            queue = writer.channels.get(todo.pop())
            while queue and queue[0].stored:
                parcel = queue[0]
                if any(writer.channels[channel][0] is not parcel for channel in parcel.channels):
                    break
                for channel in parcel.channels:
                    writer.channels[channel].popleft()
                if len(parcel.channels) > 1:
                    todo.extend(parcel.channels)
                self._release(parcel, out)

    def _release(self, parcel: Parcel, out: list[Effect]) -> None:
        if parcel.codes:
            refused = [Result(parcel.positions[index], 1, 0, (), *why) for index, why in sorted(parcel.codes.items())]
            self._answer(parcel.writer, refused, Store(False, parcel.partition))
        parts: dict[int, tuple[list[int], list[int]]] = {}
        pis = self._pis
        if parcel.many:
            if not parcel.codes:
                for uin in parcel.uins:
                    indexes, uins = parts.setdefault(uin % pis, ([], []))
                    indexes.append(0)
                    uins.append(uin)
        elif pis == 1 and not parcel.codes:
            parts[0] = list(range(parcel.count)), parcel.uins
        else:
            for index, uin in enumerate(parcel.uins):
                if index not in parcel.codes:
                    indexes, uins = parts.setdefault(uin % pis, ([], []))
                    indexes.append(index)
                    uins.append(uin)
        parcel.pending = len(parts)
        if not parts:
            self._finish(parcel)
        for partition, (indexes, uins) in parts.items():
            self._pi(partition).queue.append(Part(parcel, indexes, uins))

    # --- Pi's answers

    def _on_appended(self, event: Appended, now: float, out: list[Effect]) -> None:
        link = self._pi(event.partition)
        if event.link != link.number:
            return
        link.progress_at = now
        self.triples[link.store] = event.triple
        stale = event.triple.epoch != link.epoch
        request = link.finished(event.request)
        if request is None:
            pass
        elif event.code:
            stale = self._append_refused(link, request, event, out) or stale
        elif stale and not event.results:
            # It was answered before it was applied, and will be refused then: it names the epoch before.
            text = f"pi partition {event.partition}: the leader changed"
            self._end([part.parcel.writer for part in request.waiting], errors.StaleStream.code, text, out)
        else:
            self._appended(link, request, event, out)
        if stale:
            self._leave(link, event.text or "the leader changed", out)

    def _append_refused(self, link: Link[Part], request: Request[Part], event: Appended, out: list[Effect]) -> bool:
        """Nothing of a request was appended, or nobody knows. True: this is not the leader any more."""
        link.trouble = (event.code, event.text)
        name = f"pi partition {event.partition}"
        if event.code in PERMANENT:
            for part in request.waiting:
                if not part.parcel.done and not part.parcel.many:
                    positions = dict.fromkeys(part.parcel.positions[index] for index in part.indexes)
                    results = [Result(position, 1, 0, (), event.code, f"{name}: {event.text}") for position in positions]
                    self._answer(part.parcel.writer, results, link.store)
        # What follows of the same streams is refused by the Pi too: nothing late may overtake.
        writers = [part.parcel.writer for part in request.waiting]
        self._end(writers, event.code, f"{name}: {event.text}", out, RETRY_MS)
        return event.code in NEXT_LEADER

    def _appended(self, link: Link[Part], request: Request[Part], event: Appended, out: list[Effect]) -> None:
        at = 0
        for part in request.waiting:
            parcel, count = part.parcel, len(part.uins)
            results = event.results[at : at + count] if event.results else ()
            at += count
            if parcel.done:
                continue
            if STALE_WRITER in results or (event.results and len(results) < count):
                text = "a newer stream of this writer is open, or the leader of Pi changed"
                self._end([parcel.writer], errors.StaleWriter.code, text, out)
                continue
            copies = min(parcel.copies, event.copies) if parcel.level is Level.REPLICATED else 1
            parcel.pending -= 1
            if parcel.many:
                self._appended_to_many(link, part, results, copies)
            else:
                self._appended_to_each(link, part, results, copies)
            out.append(_grown(part, results))
            if not parcel.pending:
                self._finish(parcel)

    def _appended_to_each(self, link: Link[Part], part: Part, results: Sequence[int], copies: int) -> None:
        parcel, found = part.parcel, list[Result]()
        positions = [parcel.positions[index] for index in part.indexes]
        msg_ids = [parcel.msg_ids[index] for index in part.indexes]
        good = not results or min(results) > 0
        begin = 0
        for at in range(1, len(positions) + 1):
            if (
                at < len(positions)
                and positions[at] == positions[at - 1] + 1
                and (good or (results[at] > 0) == (results[begin] > 0))
            ):
                continue
            if good or results[begin] > 0:
                found.append(Result(positions[begin], at - begin, copies, msg_ids[begin:at]))
            else:
                refused = zip(positions[begin:at], msg_ids[begin:at], results[begin:at], strict=True)
                found += [Result(position, 1, 0, (msg_id,), *why_not(result)) for position, msg_id, result in refused]
            begin = at
        self._answer(parcel.writer, found, link.store, Store(False, parcel.partition))

    def _appended_to_many(self, link: Link[Part], part: Part, results: Sequence[int], copies: int) -> None:
        parcel = part.parcel
        parcel.copies = min(parcel.copies, copies) if parcel.level is Level.REPLICATED else 1
        for at, uin in enumerate(part.uins):
            if not results or results[at] > 0:
                parcel.open.discard(uin)
            else:
                parcel.refused = why_not(results[at])
        if parcel.pending:
            return
        stores = link.store, Store(False, parcel.partition)
        if parcel.refused is not None:
            result = Result(parcel.positions[0], 1, 0, parcel.msg_ids, *parcel.refused, sorted(parcel.open))
        else:
            result = Result(parcel.positions[0], 1, parcel.copies, parcel.msg_ids)
        self._answer(parcel.writer, [result], *stores)

    # --- time

    def _on_tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        while self._deadlines and (self._deadlines[0].done or self._deadlines[0].deadline <= now):
            parcel = self._deadlines.popleft()
            if not parcel.done:
                store = Store(True, parcel.uins[0] % self._pis) if parcel.stored else Store(False, parcel.partition)
                trouble = self._link(store).trouble or (errors.Unavailable.code, "it does not answer")
                name = f"{store.role} partition {store.partition}"
                text = f"{name} did not confirm within {self._timeout_s:g} s ({trouble[0]}: {trouble[1]})"
                code = trouble[0] if trouble[0] not in NEXT_LEADER | PERMANENT else errors.Unavailable.code
                self._end([parcel.writer], code, text, out, RETRY_MS)
        links: list[Link[Any]] = [*self._xiu_links.values(), *self._pi_links.values()]
        for link in links:
            if link.in_flight and now >= link.progress_at + STALL_S:
                self._leave(link, f"no answer for {STALL_S:g} s", out)
        self._on_turn(TurnEnded(), now, out)


def _grown(part: Part, results: Sequence[int]) -> InboxesGrew:
    """The inboxes that took their mail."""
    parcel, indexes, uins = part.parcel, part.indexes, part.uins
    if results and min(results) <= 0:
        good = [at for at, result in enumerate(results) if result > 0]
        indexes, uins, results = [indexes[at] for at in good], [uins[at] for at in good], [results[at] for at in good]
    return InboxesGrew(uins, results, [parcel.msg_ids[index] for index in indexes], parcel.data, parcel.ends, indexes)
