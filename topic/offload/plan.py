"""Plans of a leader for the object store: what to upload, write and remove next, and what files need not be kept. Pure.

    state of a part ──▶ next ──▶ Upload ──▶ UPLOADED, committed ──▶ WriteManifest ──▶ Remove ──▶ REMOVED, committed
                          ▲───────────────────────────────────────────────────────────────────────────┘

Each step follows from the state, so it does not matter where a former leader ended. What is removed is named by no manifest any
more: the manifest of this epoch comes first.

Source: docs/topics.md, "Storage apart from compute".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cluster.topics.entries import number_of, topic_of
from pixiu.objects.manifest import Manifest, StoredObject, epoch_of, folder_of, manifests_in
from topic.state.parts import Part
from topic.state.state import State

FULL: Final = 0.9
"""Share of the file system from which on writers are held."""
MAX_UNNAMED: Final = 8
"""Uploads until the next manifest while more wait."""
MAX_IDLES: Final = 30
"""Times `idle_s` after which a part that is never idle, nor full, is uploaded all the same."""
HOLD_S: Final = 5.0
"""Time for which the oldest block has waited from which on writers are held, if space is short."""
MAX_REMOVED: Final = 1000
"""Objects that are removed together."""


class Limits(NamedTuple):
    """Limits of uploads."""

    segment_bytes: int
    idle_s: float
    interval_s: float
    """Shortest time between two uploads of a part that writers wait for."""


class View(NamedTuple):
    """A part on a replica, beside its state."""

    synced: int
    """Offset below which its files have everything."""
    waiting_bytes: int
    """Bytes in files that the store does not have."""
    available: int
    """Lowest offset in its files."""
    idle_s: float
    """Time since the last block came."""
    wanted: bool
    """A writer waits for the store, or space is short."""
    age_s: float = 0.0
    """Time for which the oldest block has waited."""
    skip: int = 0
    """Offset below which nothing can be read any more."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Upload the blocks from `base` on, up to the limit of an object or to `synced`."""

    base: int
    synced: int


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Write a manifest; then remove those before it."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove objects that no manifest names, then propose REMOVED."""

    objects: Sequence[StoredObject]
    whole: bool
    """The part is no more: its folders go as a whole."""


Action = Upload | WriteManifest | Remove


@dataclass(slots=True)
class _Known:
    """A part in this leader's epoch."""

    uploaded_at: float = 0.0
    manifest: Manifest | None = None
    tried: Manifest | None = None
    """The newest one, written or not."""
    clean: bool = False
    """Those before it are removed."""
    unnamed: int = 0
    """Uploads since then."""


class Planner:
    """Plans of one leader in one epoch.

    Args:
        state: of the group.
        epoch: in which it leads.
        limits: of uploads.
    """

    def __init__(self, state: State, epoch: int, limits: Limits) -> None:
        self._state, self.epoch, self._limits = state, epoch, limits
        self._known: dict[int, _Known] = {}

    def next(self, number: int, store: str, view: View | None, now: float) -> Action | None:
        """The next step for a part; store: where it goes, empty: nowhere; view: None for one that is no more."""
        part, garbage = self._state.parts.get(number), self._state.garbage.get(number)
        if part is None or view is None:
            self._known.pop(number, None)
            return Remove(list(garbage.values())[:MAX_REMOVED], whole=True) if garbage and part is None else None
        known = self._known.setdefault(number, _Known())
        behind = view.waiting_bytes >= self._limits.segment_bytes and known.unnamed < MAX_UNNAMED
        if store and behind and self._is_due(part, view, known, now):
            return Upload(self._base(part, view, store), view.synced)
        if part.stores and self._outdated(part, known.manifest):
            if known.tried is None or self._outdated(part, known.tried):  # one that failed may be there all the same
                last = known.tried.number if known.tried is not None else 0
                known.tried = Manifest(
                    self.epoch, last + 1, topic_of(number), number_of(number), part.first, part.sealed, part.objects
                )  # fmt: skip
            return WriteManifest(known.tried)
        if garbage:
            return Remove(list(garbage.values())[:MAX_REMOVED], whole=False)
        if store and self._is_due(part, view, known, now):
            return Upload(self._base(part, view, store), view.synced)
        return None

    @staticmethod
    def _outdated(part: Part, manifest: Manifest | None) -> bool:
        return manifest is None or manifest.objects is not part.objects or manifest.sealed != part.sealed  # a change is a new list

    def _is_due(self, part: Part, view: View, known: _Known, now: float) -> bool:
        if view.synced <= max(part.stored, part.first, view.skip):
            return False
        full = view.waiting_bytes >= self._limits.segment_bytes
        asked = view.wanted and now >= known.uploaded_at + self._limits.interval_s
        idle = view.idle_s >= self._limits.idle_s or view.age_s >= MAX_IDLES * self._limits.idle_s
        return full or asked or part.sealed or idle

    def _base(self, part: Part, view: View, store: str) -> int:
        """Choose where the next object begins. It takes the place of small ones before it, each no larger than what follows: so a
        part that is written slowly has few objects, and each block is uploaded a dozen times at most."""
        base, size = max(part.stored, part.first, view.skip), view.waiting_bytes
        if view.skip > part.stored or part.first > part.stored:
            return base
        for each in reversed(part.objects):
            if each.end != base or each.size > size or size + each.size > self._limits.segment_bytes:
                break
            if each.base < view.available or each.url != store:
                break
            base, size = each.base, size + each.size
        return base

    def uploaded(self, part: int, now: float) -> None:
        """An upload is committed."""
        known = self._known.setdefault(part, _Known())
        known.uploaded_at, known.unnamed = now, known.unnamed + 1

    def before(self, part: int, manifest: Manifest) -> Manifest | None:
        """The manifest of this epoch before another one; None: that is not certain."""
        known = self._known[part]
        found = known.manifest
        return found if found is not None and known.clean and found.number == manifest.number - 1 else None

    def wrote(self, part: int, manifest: Manifest, clean: bool = True) -> None:
        """A manifest is in the store. clean: those before it are not."""
        known = self._known.setdefault(part, _Known())
        known.manifest, known.clean, known.unnamed = manifest, clean, 0

    def kept(self, number: int) -> frozenset[str]:
        """Names of the objects of a part that count, or are to be removed by an entry."""
        part, folder = self._state.parts[number], folder_of(topic_of(number), number_of(number))
        return frozenset(each.name(folder) for each in (*part.objects, *self._state.garbage.get(number, {}).values()))


def orphans(names: Iterable[str], newest: Manifest, kept: Collection[str]) -> list[str]:
    """Names in a part's folder that count no longer: objects that former leaders uploaded and nobody claimed, and manifests before
    the newest one. kept: the names of objects that count."""
    names = list(names)
    old = manifests_in(names)
    behind = set(old[old.index(newest.name) + 1 :]) if newest.name in old else set()
    stray = {name for name in names if (epoch := epoch_of(name)) is not None and epoch < newest.epoch} - set(old) - set(kept)
    return sorted(behind | stray)


def droppable(part: Part, before_us: int) -> int:
    """The offset below which a replica's files are not needed: the store has it, and it was appended before a time."""
    found = 0
    for each in part.objects:
        if each.last_us >= before_us:
            break
        found = each.end
    return found


def expired(part: Part, before_us: int, max_bytes: int, local_bytes: int) -> int:
    """The offset below which retention may drop objects: those of which the last block is older than a time, and the oldest ones
    while the part has more bytes than allowed, but the newest messages stay. local_bytes: of what is not in the store."""
    left, keep = sum(each.size for each in part.objects) + local_bytes, part.first
    for each in part.objects:
        if each.last_us >= before_us and (left <= max_bytes or left == each.size):
            break
        left -= each.size
        keep = each.end
    return keep


def hold(waiting_bytes: int, oldest_s: float, used: float, local_bytes: int, limit_bytes: int) -> str:
    """Why writers of topics with a store are held; empty: they are not. oldest_s: time for which the oldest block has waited; used:
    share of the file system; limit_bytes: 0, none."""
    if not waiting_bytes or oldest_s < HOLD_S or not pressed(used, local_bytes, limit_bytes):
        return ""
    space = f"{local_bytes:,} bytes of topics" if limit_bytes and local_bytes >= limit_bytes else f"{used:.0%} of the disk"
    return f"{waiting_bytes:,} bytes wait for the object store, and {space} are used here; writes go on when it takes them"


def pressed(used: float, local_bytes: int, limit_bytes: int) -> bool:
    """True if local space is short."""
    return used >= FULL or (0 < limit_bytes <= local_bytes)
