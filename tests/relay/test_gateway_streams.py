"""What waits for a gateway, and which connection each device's number means."""

from __future__ import annotations

from pixiu.wire.envelope import GAP, encode
from relay.delivery.events import Chunk
from relay.mail.devices import Place
from relay.mail.gateway_streams import MAX_MESSAGE_BYTES, Outbox

HERE = 101


def chunk(uin: int, device: int, seq: int, size: int = 0) -> Chunk:
    """A delivery."""
    return Chunk(uin, device, 1, encode(1, seq, uin, 5, device, 0, GAP, bytes(size)))


def test_a_device_is_named_before_its_first_delivery_and_again_with_another_connection() -> None:
    places = {(7, 1): Place(70, HERE, 5, 1), (8, 2): Place(80, HERE, 6, 2)}
    outbox = Outbox(lambda uin, number: places.get((uin, number)), HERE)
    outbox.add([chunk(7, 1, 1), chunk(7, 1, 2)])
    outbox.add([chunk(7, 1, 3)])
    first = outbox.take()
    assert [(d.uin, d.key, d.connect_time, d.device) for d in first.devices] == [(7, 70, 5, 1)]
    assert first.chunks == [chunk(7, 1, seq).data for seq in (1, 2, 3)]
    assert first.count == 3
    assert outbox.bytes == first.size
    outbox.sent(first)
    assert (outbox.bytes, len(outbox)) == (0, 0)
    outbox.add([chunk(7, 1, 4)])
    places[7, 1] = Place(70, HERE, 9, 1)
    outbox.add([chunk(7, 1, 1), chunk(8, 2, 1)])
    batches = [outbox.take() for _ in range(len(outbox))]
    assert [[(d.uin, d.connect_time) for d in batch.devices] for batch in batches] == [[], [(7, 9)], [(8, 6)]]
    assert [batch.chunks for batch in batches] == [[chunk(7, 1, 4).data], [chunk(7, 1, 1).data], [chunk(8, 2, 1).data]]


def test_a_device_that_is_elsewhere_by_now_is_not_named_here() -> None:
    outbox = Outbox(lambda _uin, _number: Place(70, HERE + 1, 5, 1), HERE)
    outbox.add([chunk(7, 1, 1)])
    assert outbox.take().devices == []


def test_messages_have_a_bound() -> None:
    outbox = Outbox(lambda _uin, _number: None, HERE)
    outbox.add([chunk(7, 1, seq, MAX_MESSAGE_BYTES // 3) for seq in range(1, 6)])
    sizes = [outbox.take().size for _ in range(len(outbox))]
    assert max(sizes) <= MAX_MESSAGE_BYTES
    assert len(sizes) == 3
    assert outbox.bytes == sum(sizes)
