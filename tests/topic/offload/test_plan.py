"""Plans for the object store: when a part is uploaded, how objects grow, what may go, and when writers are held."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.topics import entries as en
from pixiu.objects.manifest import StoredObject
from tests.topic.builders import PART, TOPIC, Log
from topic.offload.plan import MAX_UNNAMED, Limits, Planner, Remove, Upload, View, WriteManifest, droppable, expired, hold
from topic.state.parts import Part
from topic.state.state import Done

URL = "memory://s"
LIMITS = Limits(1000, 10.0, 1.0)


def made(base: int, end: int, size: int = 100, epoch: int = 1, last_us: int = 1000) -> StoredObject:
    return StoredObject(base, end, size, 0, last_us, last_us, epoch, URL)


def view(synced: int = 40, waiting: int = 100, **fields: Any) -> View:
    return View(synced, waiting, 0, 0.0, False)._replace(**fields)


class Leader:
    """A state with 40 messages, and a leader's plans."""

    def __init__(self) -> None:
        self.log = Log()
        self.log.open_part()
        self.log.write(*[1] * 40)
        self.part = self.log.store.state.parts[PART]
        self.planner = Planner(self.log.store.state, 1, LIMITS)

    def upload(self, *objects: StoredObject) -> object:
        return self.log.apply(en.UPLOADED, en.encode_objects(PART, objects))

    def next(self, seen: View | None = None, store: str = URL, now: float = 0.0) -> object:
        return self.planner.next(PART, store, seen or view(), now)

    def settled(self) -> None:
        """Write the manifest that is due, and remove what is to be removed."""
        while isinstance(action := self.next(view(0)), WriteManifest | Remove):
            if isinstance(action, WriteManifest):
                self.planner.wrote(PART, action.manifest)
            else:
                self.log.apply(en.REMOVED, en.encode_objects(PART, action.objects))


def test_a_part_is_uploaded_when_it_is_full_idle_sealed_or_asked_for() -> None:
    leader = Leader()
    assert leader.next() is None
    assert leader.next(view(waiting=1000)) == Upload(0, 40)
    assert leader.next(view(idle_s=10.0)) == Upload(0, 40)
    assert leader.next(view(idle_s=10.0), store="") is None
    assert leader.next(view(0, idle_s=10.0)) is None
    assert leader.next(view(idle_s=1.0, age_s=299.0)) is None
    assert leader.next(view(idle_s=1.0, age_s=300.0)) == Upload(0, 40)  # somebody writes all the time, and little
    leader.planner.uploaded(PART, 5.0)
    assert leader.next(view(wanted=True), now=5.9) is None
    assert leader.next(view(wanted=True), now=6.0) == Upload(0, 40)
    leader.log.apply(en.SEAL, en.encode_seal(PART, []))
    assert leader.next() == Upload(0, 40)


def test_several_uploads_of_a_part_that_is_behind_have_one_manifest() -> None:
    leader = Leader()
    for number in range(MAX_UNNAMED):
        assert leader.next(view(waiting=2000)) == Upload(number, 40)
        leader.upload(made(number, number + 1, 1000))
        leader.planner.uploaded(PART, 0.0)
    written = leader.next(view(waiting=2000))
    assert isinstance(written, WriteManifest)
    assert len(written.manifest.objects) == MAX_UNNAMED
    leader.planner.wrote(PART, written.manifest)
    assert leader.next(view(waiting=2000)) == Upload(MAX_UNNAMED, 40)


def test_an_object_counts_once_it_is_committed_in_the_epoch_of_its_upload() -> None:
    leader = Leader()
    assert leader.upload(made(0, 10)) == Done(True)
    for wrong in (made(10, 20, epoch=2), made(10, 41), made(0, 10), made(20, 20), made(5, 20)):
        answer = leader.upload(wrong)
        assert isinstance(answer, Done)
        assert not answer.ok, wrong
        assert answer.why
    assert (leader.part.objects, leader.part.stored) == ([made(0, 10)], 10)
    assert leader.upload(made(12, 20)) == Done(True)  # offsets that were given up are left out
    assert [leader.part.object_at(offset) for offset in (9, 10, 12, 20)] == [made(0, 10), None, made(12, 20), None]


def test_a_manifest_comes_before_what_it_no_longer_names_is_removed() -> None:
    leader = Leader()
    leader.upload(made(0, 10))
    leader.upload(made(0, 20))
    first = leader.next()
    assert isinstance(first, WriteManifest)
    assert (first.manifest.epoch, first.manifest.number, first.manifest.objects) == (1, 1, [made(0, 20)])
    leader.planner.wrote(PART, first.manifest)
    assert leader.next() == Remove([made(0, 10)], whole=False)
    leader.log.apply(en.REMOVED, en.encode_objects(PART, [made(0, 10)]))
    assert leader.next() is None
    leader.log.apply(en.TRIM, en.encode_trim(PART, 20))
    again = leader.next()
    assert isinstance(again, WriteManifest)
    assert (again.manifest.number, again.manifest.first, again.manifest.objects) == (2, 20, [])
    leader.planner.wrote(PART, again.manifest)
    assert leader.next() == Remove([made(0, 20)], whole=False)
    following = Planner(leader.log.store.state, 2, LIMITS).next(PART, URL, view(), 0.0)
    assert isinstance(following, WriteManifest)
    assert following.manifest.epoch == 2


def test_a_dropped_part_goes_as_a_whole_also_after_a_restart() -> None:
    leader = Leader()
    leader.upload(made(0, 10))
    leader.log.topic(deleted=True)
    leader.log.apply(en.DROP, en.encode_drop(PART))
    log = leader.log.reopened()
    action = Planner(log.store.state, 2, LIMITS).next(PART, "", None, 0.0)
    assert isinstance(action, Remove)
    assert action.whole
    assert {each.url for each in action.objects} == {URL}
    log.apply(en.REMOVED, en.encode_objects(PART, action.objects))
    assert Planner(log.reopened().store.state, 2, LIMITS).next(PART, "", None, 0.0) is None


def test_small_objects_grow_so_that_a_slow_part_has_few() -> None:
    leader = Leader()
    uploaded, at = 0, 0
    for number in range(1, 41):
        action = leader.next(view(number, 10, idle_s=10.0))
        assert isinstance(action, Upload)
        leader.upload(made(action.base, number, 10 * (number - action.base)))
        uploaded, at = uploaded + number - action.base, number
        leader.settled()
    assert at == 40
    assert len(leader.part.objects) <= 7
    assert uploaded <= 40 * 6
    assert leader.next(view(40, 0)) is None
    leader.part.end = 50
    kept = leader.next(view(50, 10, idle_s=10.0, available=40))
    assert kept == Upload(40, 50)  # what is not here any more is not uploaded again


def test_objects_survive_a_restart() -> None:
    leader = Leader()
    leader.upload(made(0, 10))
    leader.upload(made(10, 20))
    leader.upload(made(10, 30))
    state = leader.log.reopened().store.state
    part = state.parts[PART]
    assert (part.objects, part.stored, part.stores) == ([made(0, 10), made(10, 30)], 30, (URL,))
    assert state.garbage == {PART: {(10, 20): made(10, 20)}}


def test_files_may_go_once_the_store_has_what_is_in_them_and_it_is_old() -> None:
    part = Part(
        PART, 0, 65_536, end=40, stored=30, objects=[made(0, 10, last_us=5), made(10, 20, last_us=9), made(20, 30, last_us=20)]
    )
    assert [droppable(part, before_us) for before_us in (5, 6, 10, 99)] == [0, 10, 20, 30]


@pytest.mark.parametrize(("before_us", "most", "first"), [(0, 10_000, 0), (6, 10_000, 10), (0, 350, 10), (0, 99, 30), (99, 0, 30)])
def test_retention_drops_whole_objects(before_us: int, most: int, first: int) -> None:
    part = Part(
        PART, 0, 65_536, end=40, stored=30, objects=[made(0, 10, last_us=5), made(10, 20, last_us=9), made(20, 30, last_us=20)]
    )
    assert expired(part, before_us, most, 100) == first


def test_writers_are_held_only_while_something_waits_and_space_is_short() -> None:
    assert hold(0, 9, 0.95, 10, 0) == ""
    assert hold(5, 9, 0.89, 10, 0) == ""
    assert "95%" in hold(5, 9, 0.95, 10, 0)
    assert "100 bytes of topics" in hold(5, 9, 0.1, 100, 100)
    assert hold(5, 9, 0.1, 99, 100) == ""
    assert hold(5, 4.9, 0.95, 10, 0) == ""  # the store takes what it gets, and the disk is full of other things


def test_a_topic_keeps_its_store() -> None:
    log = Log()
    log.topic(store=URL)
    assert log.reopened().store.state.topics[TOPIC].store == URL
