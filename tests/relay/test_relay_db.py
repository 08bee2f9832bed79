"""The Relay DB."""

from __future__ import annotations

from pathlib import Path

from pixiu.devices import DeviceChange, Devices
from pixiu.ids import gateway_msg_id
from pixiu.replicas.store import ReplicaStore, Write
from pixiu.softstore import Key
from relay.codec import CODEC

CONNECT = DeviceChange(gateway_msg_id(3, 1, 1), 7, 65_535, True, 0, 1 << 60, 12, True)
PLAIN = DeviceChange(gateway_msg_id(3, 1, 2), 8, 0, True, 0, 5, 0, False)
GONE = DeviceChange(gateway_msg_id(4, 1, 3), 9, 1, False)


def loaded(folder: Path) -> Devices:
    store, devices = ReplicaStore(folder, 1 << 24, "relay", CODEC), Devices()
    for chunk in store.load():
        devices.merge(chunk, 0.0)
    store.close()
    return devices


def test_what_was_written_is_loaded_whole(tmp_path: Path) -> None:
    store = ReplicaStore(tmp_path, 1 << 24, "relay", CODEC)
    store.write([Write([CONNECT, PLAIN, GONE], [])], 1000)
    store.close()
    devices = loaded(tmp_path)
    assert devices.get(7, 65_535, 3) == (CONNECT.id, (1 << 60, 12, True))
    assert devices.get(8, 0, 3) == (PLAIN.id, (5, 0, False))
    assert devices.get(9, 1, 4) == (GONE.id, None)


def test_a_snapshot_can_replace_it_and_rows_of_another_size_are_left_out(tmp_path: Path) -> None:
    devices = Devices()
    devices.apply([CONNECT, PLAIN, GONE], 0.0)
    store = ReplicaStore(tmp_path, 1 << 24, "relay", CODEC)
    store.write([Write(CODEC.changes(chunk), []) for chunk in devices.snapshot()], 1000)
    store.write([Write([], [Key(8, 0, 3)])], 2000)
    store.close()
    assert (len(loaded(tmp_path)), loaded(tmp_path).tombstones) == (1, 1)
    assert CODEC.entry(Key(1, 2, 3), b"short") is None
    assert CODEC.entry(Key(1, 1 << 16, 3), bytes(20)) is None
