"""The Router DB."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.membership.map.lww_map import CHUNK_ENTRIES, Key, LwwMap
from cluster.membership.map.updates import Update
from cluster.membership.replica.store import ReplicaStore, StoreError, Write
from pixiu.ids import gateway_msg_id
from router.replicated.store import TableStore
from tests.support.platter import Platter

MIB = 1 << 20


def login(counter: int, room: int, uin: int = 7, instance: int = 3) -> Update:
    return Update(gateway_msg_id(instance, 1, counter), room, uin, True)


def loaded(store: ReplicaStore) -> LwwMap:
    membership = LwwMap()
    for chunk in store.load():
        membership.merge(chunk, 0.0)
    return membership


def test_what_was_written_is_loaded_logins_and_tombstones(tmp_path: Path) -> None:
    store = ReplicaStore("router", tmp_path / "db", 16 * MIB)
    store.write([Write([login(1, 42), login(2, 43), login(3, 43)._replace(login=False), login(4, (1 << 63) - 1)], [])], 1000)
    store.close()
    store = ReplicaStore("router", tmp_path / "db", 16 * MIB)
    membership = loaded(store)
    assert membership.gateways(42) == membership.gateways((1 << 63) - 1) == (3,)
    assert membership.get(43, 7, 3) == (gateway_msg_id(3, 1, 3), False)
    assert store.count() == 3
    store.close()


def test_operations_are_carried_out_in_order(tmp_path: Path) -> None:
    store = ReplicaStore("router", tmp_path, 16 * MIB)
    store.write([Write([], [Key(42, 7, 3)]), Write([login(1, 42)], []), Write([login(2, 43)], [Key(43, 7, 3)])], 1000)
    assert (loaded(store).gateways(42), loaded(store).gateways(43)) == ((3,), ())
    store.close()


def test_two_processes_cannot_have_one_database(tmp_path: Path) -> None:
    store = ReplicaStore("router", tmp_path, 16 * MIB)
    with pytest.raises(StoreError, match="its own data_dir"):
        ReplicaStore("router", tmp_path, 16 * MIB)
    store.close()
    ReplicaStore("router", tmp_path, 16 * MIB).close()


def test_deletes_and_clear(tmp_path: Path) -> None:
    store = ReplicaStore("router", tmp_path, 16 * MIB)
    store.write([Write([login(1, 42), login(2, 43)], []), Write([], [Key(42, 7, 3), Key(99, 9, 9)])], 2000)
    assert sorted(loaded(store).instances()) == [3]
    assert loaded(store).groups == 1
    store.clear()
    assert store.count() == 0
    assert store.age_s(2000) is None
    store.close()


def test_the_age_is_counted_from_the_last_write_that_made_it_complete(tmp_path: Path) -> None:
    store = ReplicaStore("router", tmp_path, 16 * MIB)
    assert store.age_s(5000) is None
    store.write([Write([login(1, 42)], [])], None)
    assert store.age_s(5000) is None
    store.write([], 5000)
    assert store.age_s(8500) == 3.5
    assert store.age_s(4000) == 0.0
    store.close()


@pytest.mark.slow
def test_a_large_content_is_loaded_in_chunks(tmp_path: Path) -> None:
    store = ReplicaStore("router", tmp_path, 64 * MIB)
    store.write([Write([login(i + 1, i % 900, i) for i in range(25_000)], [])], 1000)
    chunks = list(store.load())
    assert len(chunks) == -(-25_000 // CHUNK_ENTRIES)
    assert len(loaded(store)) == 25_000
    store.close()


def test_a_full_database_says_so_keeps_what_it_has_and_writes_nothing_in_part(tmp_path: Path) -> None:
    store = ReplicaStore("router", tmp_path, MIB)
    store.write([Write([login(1, 42)], [])], 1000)
    with pytest.raises(StoreError, match=r"raise router\.store_mb"):
        store.write([Write([login(i + 2, i) for i in range(60_000)], [])], 2000)
    assert len(loaded(store)) == 1
    assert store.age_s(1000) == 0.0
    store.close()


def test_a_damaged_file_is_refused_with_a_text_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(os.urandom(40_000))
    with pytest.raises(StoreError, match="move it away") as refused:
        ReplicaStore("router", tmp_path, 16 * MIB)
    (tmp_path / "data.mdb").rename(tmp_path / "damaged")
    ReplicaStore("router", tmp_path, 16 * MIB).close()  # its lock is not kept by the error
    del refused


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be opened"):
        ReplicaStore("router", tmp_path / "file" / "db", 16 * MIB)


@pytest.mark.process
def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom cluster.membership.map.updates import Update\n"
        "from cluster.membership.replica.store import ReplicaStore, Write\n"
        "store = ReplicaStore('router', Path(sys.argv[1]), 1 << 24)\n"
        "store.write([Write([Update(5, 42, 7, True)], [])], 1000)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -9
    store = ReplicaStore("router", tmp_path, 16 * MIB)
    assert loaded(store).gateways(42) == (0,)
    store.close()


def test_a_power_cut_leaves_the_names_of_a_replicated_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Platter(tmp_path, tmp_path / "left", monkeypatch)
    folder = Platter(tmp_path / "db", tmp_path / "left_in_db", monkeypatch)
    TableStore(tmp_path / "db", 16 * MIB, "retained messages", "router.retained_mb").close()
    assert (parent.shadow / "db").exists()
    assert (folder.shadow / "data.mdb").exists()
