"""Objects and manifests: in a folder and in memory alike, the newest one counts, and what is wrong says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pixiu.errors import ConfigurationError, InvalidArgument, MalformedData, Unavailable
from pixiu.objects.manifest import Manifest, StoredObject, check_url, epoch_of, manifests_in
from pixiu.objects.store import ObjectExists, ObjectMissing, ObjectStore, check_protocol
from tests.support.faulty_store import faulty_store
from tests.support.platter import Platter

ONE = StoredObject(0, 10, 100, 7, 1000, 2000, 3, "memory://s")


def manifest(epoch: int, number: int, *objects: StoredObject) -> Manifest:
    return Manifest(epoch, number, 7, 1, 0, False, list(objects))


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore(str(tmp_path / "store")) if request.param == "folder" else faulty_store()[0]


def test_objects_are_written_read_listed_and_removed(store: ObjectStore) -> None:
    assert store.names("7-1") == []
    store.put("7-1/a.seg", b"one")
    store.put("7-1/a.seg", b"two")
    store.create("7-1/b.json", b"three")
    with pytest.raises(ObjectExists):
        store.create("7-1/b.json", b"four")
    assert store.read("7-1/a.seg") == b"two"
    assert store.read("7-1/b.json") == b"three"
    assert store.names("7-1") == ["7-1/a.seg", "7-1/b.json"]
    store.remove(["7-1/a.seg", "7-1/none"])
    assert store.names("7-1") == ["7-1/b.json"]
    with pytest.raises(ObjectMissing):
        store.read("7-1/a.seg")


def test_a_power_cut_leaves_the_folder_of_an_object_whoever_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store/7-2").mkdir(parents=True)  # by a process that was killed before it synced anything
    platter = Platter(tmp_path / "store", tmp_path / "left", monkeypatch)
    store = ObjectStore(str(tmp_path / "store"))
    store.put("7-1/a.seg", b"one")
    assert (platter.shadow / "7-1").exists()
    (platter.shadow / "7-2").unlink()
    store.create("7-2/b.json", b"two")
    assert (platter.shadow / "7-2").exists()


def test_the_manifest_of_the_highest_epoch_counts_whoever_wrote_last(store: ObjectStore) -> None:
    assert store.manifest(7, 1) is None
    newest = manifest(12, 1, ONE)
    for each in (manifest(9, 1), newest, manifest(9, 30)):
        store.create(each.name, each.encode())
    assert store.manifest(7, 1) == newest
    store.create(manifest(12, 2).name, b"{torn")
    assert store.manifest(7, 1) == newest


def test_names_say_who_wrote_them() -> None:
    assert manifests_in([manifest(2, 9).name, "7-1/x", manifest(10, 1).name]) == [manifest(10, 1).name, manifest(2, 9).name]
    assert (epoch_of(ONE.name("7-1")), epoch_of(manifest(10, 1).name), epoch_of("7-1/.x")) == (3, 10, None)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version":2}', manifest(1, 1, ONE._replace(size="x")).encode()])  # type: ignore[arg-type]
def test_a_manifest_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedData):
        Manifest.decode(data)


@pytest.mark.parametrize("url", ["folder", "s3://key:secret@bucket/x", "x" * 2000, "/a\nb", "http://[x"])
def test_a_store_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        check_url(url)


def test_a_protocol_that_nobody_knows_is_refused_and_others_are_not() -> None:
    for url in ("", "/mnt/a", "s3://bucket/x", "memory://x"):
        check_protocol(url)
    with pytest.raises(InvalidArgument, match="the protocol foo, which fsspec does not know; use an absolute folder"):
        check_protocol("foo://bar")


def test_a_store_is_a_folder_or_a_url() -> None:
    assert [check_url(url) for url in ("", "/data/", "s3://bucket/a/", "hdfs://user@host/x")] == [
        "", "/data", "s3://bucket/a", "hdfs://user@host/x",
    ]  # fmt: skip


def test_what_is_missing_for_a_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be opened.*nosuch"):
        ObjectStore("nosuch://x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigurationError, match=r"pixiu-cluster\[store\]"):
        ObjectStore("memory://x")


def test_a_store_that_is_away_says_so() -> None:
    store, files = faulty_store()
    files.away = True
    for call in (lambda: store.put("a", b""), lambda: store.read("a"), lambda: store.names("a"), lambda: store.remove(["a"])):
        with pytest.raises(Unavailable, match="503"):
            call()
