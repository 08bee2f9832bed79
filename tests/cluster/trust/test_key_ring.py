"""Keys of datagrams: what they prove, how they are exchanged, and what a folder must hold."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.links.datagrams.head import HEARTBEAT, RECORDS, Codec, DatagramRefusal
from cluster.trust.key_ring import ROLES, TAG_SIZE, KeyRing, key_byte, read_key_ring
from ops.access.keys import keys as command
from pixiu.discovery import paths
from pixiu.errors import ConfigurationError
from pixiu.ids import EndpointID

GATEWAY, ROUTER, BROKER = EndpointID(0x1111111122222222), EndpointID(0x3333333344444444), EndpointID(0x5555555566666666)
OLD, NEW = b"the first key of all", b"the key that is next"
ITEM = bytes(40)


def codec(own: EndpointID, role: str, keys: dict[int, bytes] | None = None, signing: int = 1) -> Codec:
    return Codec(own, 8192, 300_000, KeyRing(keys or {1: OLD}, signing), role)


def sent(sender: Codec, to: Codec, role: str, type_: int = RECORDS) -> bytes:
    sender.peer_roles[to.own] = role
    return sender.pack(type_, 0, 1, 7, 3, to.own, [ITEM])


def test_every_role_has_a_number_that_stays() -> None:
    assert set(ROLES) == set(paths.ROLES)
    assert [key_byte(1, role) for role in ("broker", "xiu")] == [0x11, 0x17]


def test_a_tag_proves_the_senders_role_and_is_good_for_one_role_only() -> None:
    gateway, router = codec(GATEWAY, "gateway"), codec(ROUTER, "router")
    data = sent(gateway, router, "router")
    assert not isinstance(router.unpack(data, False), str)
    assert router.proven_roles == {GATEWAY: "gateway"}
    # The same key ring, the same endpoint, and another role: a relay does not take what was signed for a router.
    assert codec(ROUTER, "relay").unpack(data, False) == DatagramRefusal.TAG
    forged = data[:4] + bytes([key_byte(1, "broker")]) + data[5:]
    assert codec(ROUTER, "router").unpack(forged, False) == DatagramRefusal.TAG


def test_a_peer_is_not_taken_for_another_role_although_it_signs_rightly() -> None:
    router, liar = codec(ROUTER, "router"), codec(GATEWAY, "gateway")
    router.peer_roles[GATEWAY] = "broker"
    assert router.unpack(sent(liar, router, "router"), False) == DatagramRefusal.SENDER


def test_who_was_heard_is_answered_with_the_key_for_its_role() -> None:
    gateway, router = codec(GATEWAY, "gateway"), codec(ROUTER, "router")
    assert not isinstance(router.unpack(sent(gateway, router, "router"), False), str)
    assert not isinstance(gateway.unpack(router.pack(HEARTBEAT, 0, 0, 1, 0, GATEWAY, []), False), str)


def test_every_changed_byte_is_refused() -> None:
    gateway, router = codec(GATEWAY, "gateway"), codec(ROUTER, "router")
    data = sent(gateway, router, "router")
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
        assert router.unpack(changed, False) in (DatagramRefusal.KEY, DatagramRefusal.TAG)
    assert router.unpack(data[:-TAG_SIZE] + bytes(TAG_SIZE), False) == DatagramRefusal.TAG


def test_keys_are_exchanged_one_process_after_the_other() -> None:
    """Prepared, in use, dropped: at every step those a step apart understand each other."""
    steps = [KeyRing({1: OLD}, 1), KeyRing({1: OLD, 2: NEW}, 1), KeyRing({1: OLD, 2: NEW}, 2), KeyRing({2: NEW}, 2)]
    gateway, router = codec(GATEWAY, "gateway"), codec(ROUTER, "router")
    for step in steps[1:]:
        gateway.set_ring(step)
        assert not isinstance(router.unpack(sent(gateway, router, "router"), False), str)
        assert not isinstance(gateway.unpack(sent(router, gateway, "gateway"), False), str)
        router.set_ring(step)
    late = codec(BROKER, "broker")
    assert router.unpack(sent(late, router, "router"), False) == DatagramRefusal.KEY


def test_the_command_makes_uses_and_drops_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = CliRunner(), ["--dir", str(tmp_path / "keys")]

    def ring() -> KeyRing:
        return read_key_ring(tmp_path / "keys")

    assert run.invoke(command, ["use", *folder]).exit_code == 2
    for name in ("add", "use", "add"):
        assert run.invoke(command, [name, *folder]).exit_code == 0
    assert ring().name() == "signs with 1, accepts 1, 2"
    twice = run.invoke(command, ["add", *folder])
    assert (twice.exit_code, "has 2.next already" in twice.stderr) == (2, True)
    run.invoke(command, ["use", *folder])
    assert (ring().signing, len(ring().keys)) == (2, 2)
    early = run.invoke(command, ["drop", *folder])
    assert (early.exit_code, "ten minutes" in early.stderr, len(ring().keys)) == (2, True, 2)
    late = time.time() + 601
    monkeypatch.setattr(time, "time", lambda: late)
    assert run.invoke(command, ["drop", *folder]).stdout.split() == [str(tmp_path / "keys/1.key")]
    assert ring().name() == "signs with 2, accepts 2"
    assert (tmp_path / "keys/2.key").stat().st_mode & 0o077 == 0
    assert ring().keys[2].decode() not in repr(ring())


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({}, "no key in use"),
        ({"1.next": OLD}, "no key in use"),
        ({"1.key": b"short"}, "5 bytes"),
        ({"1.key": b"x" * 90}, "90 bytes"),
    ],
)
def test_a_folder_that_does_not_do_is_said(tmp_path: Path, files: dict[str, bytes], what: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigurationError, match=f"key_dir.*{what}"):
        read_key_ring(tmp_path)
    with pytest.raises(ConfigurationError, match="`pixiu keys add` makes it"):
        read_key_ring(tmp_path / "nowhere")
