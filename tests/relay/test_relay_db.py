"""The Relay DB: connect times survive with the entries."""

from __future__ import annotations

from pathlib import Path

from cluster.membership.map.devices import Devices, connected
from cluster.membership.map.lww_map import Key
from cluster.membership.map.updates import Update, logins
from cluster.membership.replica.store import ReplicaStore, Write
from pixiu.ids import gateway_msg_id

KEY = 12 << 48 | 65_535
CONNECT = connected(gateway_msg_id(3, 1, 1), 7, KEY, 1 << 60, chat=True)
PLAIN = Update(gateway_msg_id(3, 1, 2), 8, 5, True)
GONE = Update(gateway_msg_id(4, 1, 3), 9, 1, False)


def loaded(folder: Path) -> Devices:
    store, devices = ReplicaStore("relay", folder, 1 << 24), Devices()
    for chunk in store.load():
        devices.merge(chunk, 0.0)
    store.close()
    return devices


def test_what_was_written_is_loaded_whole(tmp_path: Path) -> None:
    store = ReplicaStore("relay", tmp_path, 1 << 24)
    store.write([Write([CONNECT, PLAIN, GONE], [])], 1000)
    store.close()
    devices = loaded(tmp_path)
    assert devices.get(7, KEY, 3) == (CONNECT.id, True)
    assert [(c.connect_time, c.chat) for c in devices.connections(7)] == [(1 << 60, True)]
    assert (devices.get(8, 5, 3), devices.value(8, 5, 3)) == ((PLAIN.id, True), 0)
    assert devices.get(9, 1, 4) == (GONE.id, False)


def test_a_snapshot_can_replace_it(tmp_path: Path) -> None:
    devices = Devices()
    devices.apply([CONNECT, PLAIN, GONE], 0.0)
    store = ReplicaStore("relay", tmp_path, 1 << 24)
    store.write([Write(logins(chunk.entries, chunk.values), []) for chunk in devices.snapshot()], 1000)
    store.write([Write([], [Key(8, 5, 3)])], 2000)
    store.close()
    found = loaded(tmp_path)
    assert [(c.key, c.connect_time) for c in found.connections(7)] == [(KEY, 1 << 60)]
    assert len(found) == 1
