"""A replica's shell for the object store: uploads of a leader, local files that may go, and what is read back.

    look, twice a second ──▶ plan ──▶ a task for each part with work, a few at once ──▶ store, log
                         └──▶ space: are writers held?    └──▶ files that may go, on every replica

Whatever fails is tried again with jitter, for ever: the next look finds the same work.

Source: docs/topics.md, "Storage apart from compute".
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

from cluster.process.context import Context
from cluster.topics import entries as en
from pixiu.errors import (
    ConfigurationError,
    DiskFailed,
    DiskFull,
    MalformedData,
    NotServed,
    OutcomeUnknown,
    PixiuError,
    Refusal,
    Unavailable,
)
from pixiu.objects.manifest import Manifest, folder_of
from pixiu.objects.store import ObjectExists, ObjectStore
from pixiu.rpc.backoff import Backoff
from pixiu.wire.v1 import topic_pb2 as pb
from topic.clients.group import Group
from topic.events import StoreLeft
from topic.mending import Mending
from topic.offload import plan
from topic.offload.cut import cut
from topic.offload.fetcher import Fetcher
from topic.offload.steps import remove, write_manifest
from topic.offload.threads import in_thread
from topic.options import Options
from topic.state.parts import Part
from topic.state.state import Done
from topic.storage.machine import Machine

LOOK_S: Final = 0.5
DROP_S: Final = 5.0
"""Interval of looks for local files that may go."""
WORKS_AT_ONCE: Final = 4
FIRST_PAUSE_S: Final = 0.2
MAX_PAUSE_S: Final = 10.0
DEGRADED_S: Final = 60.0
"""Age of the oldest block that waits from which on the replica reports itself as degraded, while uploads fail."""
AWAY: Final = "topic_store_away"
BACK: Final = "topic_store_back"
CONFLICT: Final = "topic_store_conflict"
TOLD_RETRY_MS: Final = 5000
"""Time after which a writer that was told of a failure of the store sends again, milliseconds."""


class Offload:
    """The object store of one replica.

    Args:
        context: of the process.
        group: the replica.
        machine: its state.
        mending: its gaps.
    """

    def __init__(self, context: Context[Options], group: Group, machine: Machine, mending: Mending) -> None:
        self._context, self._group, self._machine, self._mending = context, group, machine, mending
        options = self._options = context.options
        folder = Path(options.data_dir) / "store-cache"
        self.fetcher = Fetcher(folder, options.store_cache_mb << 20, self._store_at)
        self._stores: dict[str, ObjectStore] = {}
        self._lock = threading.Lock()
        self._slots = asyncio.Semaphore(WORKS_AT_ONCE)
        self._planner: plan.Planner | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, tuple[int, float]] = {}
        """Part → bytes that wait for the store, and since when, monotonic seconds."""
        self._problems: dict[int, str] = {}
        """Part → why its last step failed."""
        self._dropped_at = 0.0
        self._away = self._short = False
        self.uploads = self.uploaded_bytes = self.failures = 0

    # --- stores

    def check(self) -> None:
        """Open the role's own store. Raises ConfigurationError."""
        if self._options.store:
            ObjectStore(self._options.store)

    def store_of(self, topic: en.TopicSettings) -> str:
        """URL of a topic's store, with this cluster's folder; empty: it has none, as one that is compacted: its segments change."""
        if topic.compact:
            return ""
        url, cluster = topic.store or self._options.store, self._context.view.layout.cluster
        return f"{url.rstrip('/')}/{cluster}" if url and cluster else ""

    def _store_at(self, url: str) -> ObjectStore:
        with self._lock:
            found = self._stores.get(url)
            if found is None:
                try:
                    found = self._stores[url] = ObjectStore(url)
                except ConfigurationError as problem:
                    self._group.core.stored.unusable[url] = str(problem)
                    raise Unavailable(str(problem)) from problem
                self._group.core.stored.unusable.pop(url, None)
            return found

    # --- looks

    def leader_changed(self, epoch: int) -> None:
        """Begin with a plan of this epoch; 0: this replica does not lead."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._waiting.clear()
        self._problems.clear()
        limits = plan.Limits(
            self._options.store_segment_mb << 20, self._options.store_idle_s, self._options.store_interval_ms / 1000
        )
        self._planner = plan.Planner(self._group.store.state, epoch, limits) if epoch else None

    async def look(self) -> None:
        """Look at all parts; start what is to be done."""
        if not self._machine.opened:
            return
        store, stored = self._group.store, self._group.core.stored
        if not (store.state.garbage or self._options.store or any(topic.store for topic in store.state.topics.values())):
            stored.hold = ""
            self._waiting.clear()  # a topic may have had a store
            await self._drop(short=False)
            return
        used = await asyncio.to_thread(_used, self._options.data_dir)  # the other threads may wait for the store
        local = sum(log.stored_bytes for log in store.logs.values())
        limit = self._options.local_mb << 20
        self._short = plan.pressed(used, local, limit)
        if self._planner is not None and self._group.core.delivers:
            await self._flush_wanted()
            self._measure()
            for part in [*store.state.parts, *store.state.garbage]:
                if part not in self._tasks and self._next(part) is not None:
                    task = self._tasks[part] = asyncio.create_task(self._work(part))
                    task.add_done_callback(partial(self._ended, part))
        stored.hold = plan.hold(sum(size for size, _ in self._waiting.values()), self.oldest_s, used, local, limit)
        await self._drop(short=self._short)
        self._report()

    async def _flush_wanted(self) -> None:
        logs = self._group.store.logs
        if any(part in logs and logs[part].synced < logs[part].end for part in self._group.core.stored.parts):
            try:
                await self._machine.flush()
            except (DiskFull, DiskFailed):
                return  # the flushes in turn report it

    def _measure(self) -> None:
        store, now, before, found = self._group.store, time.monotonic(), self._waiting, dict[int, tuple[int, float]]()
        for part in store.state.parts.values():
            log, topic = store.logs.get(part.part), store.state.topics.get(en.topic_of(part.part))
            if log is not None and topic is not None and log.end > max(part.stored, part.first) and self.store_of(topic):
                size = log.bytes_from(max(part.stored, part.first)) + log.tail_bytes
                found[part.part] = size, before.get(part.part, (0, now))[1]
        self._waiting = found

    def _ended(self, part: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(part) is task:
            del self._tasks[part]
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._context.crash(problem)

    async def _drop(self, *, short: bool) -> None:
        """Let files go that the store has; short: of space, so that young ones go, too."""
        now = time.monotonic()
        if now < self._dropped_at + DROP_S:
            return
        self._dropped_at = now
        store, some = self._group.store, False
        before_us = time.time_ns() // 1000 - (0 if short else int(self._options.local_retention_s * 1_000_000))
        for part in store.state.parts.values():
            log = store.logs.get(part.part)
            if log is not None and part.objects:
                first = plan.droppable(part, before_us)
                store.local_firsts[part.part] = first
                some |= len(log.segments) > 1 and log.segments[1].base <= first
        if some:
            try:
                await self._machine.flush()
            except (DiskFull, DiskFailed):
                return

    def _report(self) -> None:
        away = any(self._problems.values())
        if away != self._away:
            self._away = away
            if away:
                self._context.log.error(AWAY, problem=next(iter(self._problems.values())))
            else:
                self._context.log.info(BACK)

    # --- the work on one part

    def _next(self, number: int) -> plan.Action | None:
        assert self._planner is not None
        store = self._group.store
        part, log = store.state.parts.get(number), store.logs.get(number)
        topic, view = store.state.topics.get(en.topic_of(number)), None
        if part is not None:
            if log is None:
                return None
            begin = max(part.stored, part.first)
            idle_s = max(0.0, time.time() - log.last_us / 1_000_000)
            wanted = self._short or number in self._group.core.stored.parts
            age_s = time.monotonic() - self._waiting[number][1] if number in self._waiting else 0.0
            skip = self._mending.given_up_at(number, begin)
            view = plan.View(log.synced, log.bytes_from(begin), log.first, idle_s, wanted, age_s, skip)
        return self._planner.next(number, self.store_of(topic) if topic is not None else "", view, time.monotonic())

    async def _work(self, part: int) -> None:
        """Do what is to be done for a part, until there is nothing."""
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, random.random)
        while True:
            try:
                async with self._slots:
                    match action := self._next(part):
                        case plan.Upload():
                            await self._upload(part, action)
                        case plan.WriteManifest():
                            await self._write_manifest(part, action.manifest)
                        case plan.Remove():
                            await self._remove(part, action)
                        case None:
                            self._problems.pop(part, None)
                            return
            except (PixiuError, OSError) as problem:
                self.failures += 1
                self._problems[part] = str(problem)
                if part in self._group.core.stored.parts:
                    text = f"the object store does not have the message, which is replicated: {problem}"
                    self._group.step(StoreLeft(Refusal(OutcomeUnknown.code, text, TOLD_RETRY_MS), part))
                await asyncio.sleep(backoff.next_s())
            else:
                self._problems.pop(part, None)
                backoff.reset()

    async def _upload(self, number: int, action: plan.Upload) -> None:
        assert self._planner is not None
        store, epoch = self._group.store, self._planner.epoch
        log, topic = store.logs[number], store.state.topics[en.topic_of(number)]
        url, most = self.store_of(topic), self._options.store_segment_mb << 20
        made = await in_thread(
            partial(cut, store.files, list(log.segments), action.base, action.synced, most, epoch, url)
        )  # fmt: skip
        if made.gap is not None:
            self._mending.found(number, made.gap)
        if made.object is None:
            raise MalformedData(
                f"offsets from {action.base} on cannot be read here; they are uploaded when another replica has them"
            )
        name = made.object.name(_folder(number))
        await in_thread(lambda: self._store_at(url).put(name, made.data))
        await self._append(en.UPLOADED, en.encode_objects(number, [made.object]))
        self.uploads += 1
        self.uploaded_bytes += len(made.data)
        self._planner.uploaded(number, time.monotonic())
        if number in self._waiting:
            self._waiting[number] = self._waiting[number][0], time.monotonic()

    async def _write_manifest(self, number: int, manifest: Manifest) -> None:
        planner, part = self._planner, self._group.store.state.parts[number]
        assert planner is not None
        topic = self._group.store.state.topics.get(en.topic_of(number))
        url = (self.store_of(topic) if topic is not None else "") or part.stores[-1]
        before, kept = planner.before(number, manifest), planner.kept(number)
        try:
            clean = await in_thread(lambda: write_manifest(self._store_at(url), manifest, before, kept))
        except ObjectExists as problem:
            self._context.log.error(CONFLICT, part=number, manifest=manifest.name)
            raise MalformedData(f"{problem}: another process writes the manifests of this part in this leader's epoch") from problem
        planner.wrote(number, manifest, clean)

    async def _remove(self, number: int, action: plan.Remove) -> None:
        await in_thread(partial(remove, self._store_at, number, action))
        await self._append(en.REMOVED, en.encode_objects(number, action.objects))

    async def _append(self, kind: int, payload: bytes) -> None:
        answer = await self._group.request(kind, payload)
        if isinstance(answer, Done) and not answer.ok:
            raise NotServed(answer.why)

    # --- what others see

    def describe(self, part: Part) -> pb.TopicStore | None:
        """A part's storage apart; None: it has none."""
        topic = self._group.store.state.topics.get(en.topic_of(part.part))
        url = (self.store_of(topic) if topic is not None else "") or (part.stores[-1] if part.objects else "")
        if not url:
            return None
        size, since = self._waiting.get(part.part, (0, time.monotonic()))
        oldest_ms = int((time.monotonic() - since) * 1000)
        return pb.TopicStore(
            url=url, end=part.stored, waiting_bytes=size, oldest_ms=oldest_ms, problem=self._problems.get(part.part, "")
        )  # fmt: skip

    @property
    def oldest_s(self) -> float:
        """Time for which the oldest block has waited."""
        return max((time.monotonic() - since for _, since in self._waiting.values()), default=0.0)

    @property
    def text(self) -> str:
        """Report for an operator; empty: nothing is wrong."""
        if hold := self._group.core.stored.hold:
            return f"writers are held: {hold}"
        if not self._problems or self.oldest_s < DEGRADED_S:
            return ""
        size = sum(size for size, _ in self._waiting.values())
        why = next(iter(self._problems.values()))
        return f"{size:,} bytes wait for the object store, the oldest for {self.oldest_s:.0f} s: {why}"

    def samples(self) -> dict[str, object]:
        """Metrics."""
        return {
            "store_waiting_bytes": sum(size for size, _ in self._waiting.values()),
            "store_oldest_s": self.oldest_s,
            "store_uploads_total": self.uploads,
            "store_uploaded_bytes_total": self.uploaded_bytes,
            "store_failures_total": self.failures,
            "store_fetches_total": self.fetcher.fetches,
            "store_fetched_bytes_total": self.fetcher.fetched_bytes,
            "store_cached_bytes": self.fetcher.cached_bytes,
            "store_holds_writers": int(bool(self._group.core.stored.hold)),
        }

    async def close(self) -> None:
        """Stop what is under way."""
        tasks = list(self._tasks.values())
        self.leader_changed(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.fetcher.close()


def _folder(part: int) -> str:
    return folder_of(en.topic_of(part), en.number_of(part))


def _used(folder: str) -> float:
    """Share of a folder's file system that is used."""
    found = os.statvfs(folder)
    return 1.0 - found.f_bavail / max(found.f_blocks, 1)
