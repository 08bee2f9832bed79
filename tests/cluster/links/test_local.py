"""Links inside a process: the order of turns, what an outcome means, bounds, and the states of peers."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable

import pytest

from cluster.links.api import Outcome, PeerState
from cluster.links.local import MAX_BATCHES, PERFECT
from cluster.links.options import LinkOptions
from cluster.metrics.metrics import Metrics, link_samples
from pixiu.errors import InvalidArgument
from pixiu.ids import EndpointID
from tests.cluster.links.world import Node, Recorder, World, flood, make_record


@pytest.fixture
def world() -> World:
    return World(local=True)


class Acting(Recorder):
    """A handler that does something with what it gets, and writes down in one list of all what happens."""

    def __init__(self, name: str, log: list[str], act: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.name, self.log, self.act = name, log, act
        self.outcome_of_records = Outcome.TAKEN

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        super().on_records(peer, data, start, end, count)
        self.log.append(f"{self.name} records")
        self.act()
        return self.outcome_of_records

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        super().on_control(peer, messages)
        self.log.append(f"{self.name} control")
        self.act()
        return self.outcome

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        super().on_settled(peer, settled)
        self.log.append(f"{self.name} settled")


def roles(world: World, number: int, log: list[str] | None = None, options: LinkOptions | None = None) -> list[Node]:
    """Roles that know each other, each with a handler that acts."""
    found = [world.node(each + 1, options) for each in range(number)]
    for node in found:
        handler = Acting(f"{node.id}", [] if log is None else log)
        node.handler = node.core.port.handler = node.core._handler = handler
        node.know(*(other for other in found if other is not node))
    world.settle()
    if log is not None:
        log.clear()
    return found


def acts(node: Node, act: Callable[[], None], at_end: bool = False) -> None:
    """What a role does with its input, at once or at the end of it."""
    assert isinstance(node.handler, Acting)
    node.handler.act = (lambda: node.at_end.append(act)) if at_end else act


def test_a_chain_of_roles_is_worked_off_in_one_call(world: World) -> None:
    log: list[str] = []
    gateway, proxy, broker = roles(world, 3, log)
    acts(proxy, lambda: proxy.send(broker, [make_record(2)]), at_end=True)
    acts(broker, lambda: broker.send(gateway, [make_record(3)]))
    gateway.send(proxy, [make_record(1)])
    gateway.turn()
    assert log == ["2 records", "3 records", "1 records"]
    assert gateway.handler.keys() == [3]


def test_a_parcel_settles_when_all_that_its_receiver_queued_has_left(world: World) -> None:
    log: list[str] = []
    gateway, proxy, broker = roles(world, 3, log)
    acts(proxy, lambda: proxy.send(broker, [make_record(2)], token=9), at_end=True)
    gateway.control(proxy, [b"publish"], token=1)
    gateway.turn()
    assert log == ["2 control", "3 records", "1 settled", "2 settled"]
    assert (gateway.handler.settled, proxy.handler.settled) == ([(1, True)], [(9, True)])


def test_it_settles_also_later_than_in_its_turn(world: World) -> None:
    gateway, proxy, broker = roles(world, 3)
    many = 8 * MAX_BATCHES + 100
    acts(proxy, lambda: flood(proxy, broker, many), at_end=True)
    gateway.control(proxy, [b"publish"], token=1)
    gateway.turn()
    while len(broker.handler.records) < many:
        assert gateway.handler.settled == [], "some of it waits still"
        acts(proxy, lambda: None)
        gateway.turn()
    world.settle()
    assert gateway.handler.settled == [(1, True)]


def test_what_waits_for_more_settles_nothing_later(world: World) -> None:
    """As an acknowledgement of a datagram does not wait for it."""
    gateway, proxy, broker = roles(world, 3)
    acts(proxy, lambda: proxy.send(broker, [make_record(2)], more=True))
    gateway.control(proxy, [b"publish"], token=1)
    gateway.turn()
    assert (gateway.handler.settled, broker.handler.records) == ([(1, True)], [])


def test_nobody_is_entered_while_they_work_however_often_it_goes_to_and_fro(world: World) -> None:
    """`Node.take_local` checks it."""
    one, other = roles(world, 2)
    acts(one, lambda: one.send(other, [make_record(1)]))
    acts(other, lambda: other.send(one, [make_record(1)]))
    one.send(other, [make_record(1)])
    before = len(one.handler.records) + len(other.handler.records)
    one.turn()
    assert len(one.handler.records) + len(other.handler.records) == before + MAX_BATCHES
    assert world.switch is not None
    assert world.switch.waits(), "the next iteration of the loop goes on"


def test_a_turn_hands_over_so_many_batches_and_each_sender_has_its_share(world: World) -> None:
    one, two, three = roles(world, 3)
    flood(one, three, 8 * MAX_BATCHES)
    flood(two, three, 80)
    one.core.flush(world.now)
    two.core.flush(world.now)
    one.turn()
    assert len(three.handler.batches) == MAX_BATCHES
    assert three.handler.keys().count(80) == 2, "the second sender's last record, and the first one's"
    world.settle()
    assert len(three.handler.records) == 8 * MAX_BATCHES + 80


def test_batches_keep_to_the_size_of_a_datagram_and_a_larger_record_is_alone(world: World) -> None:
    one, other = roles(world, 2)
    one.send(other, [make_record(number) for number in range(200)])
    one.send(other, [make_record(200, 100_000), make_record(201)])
    one.turn()
    assert other.handler.keys() == list(range(202))
    assert other.handler.batches[-2:] == [1, 1]
    assert max(other.handler.batches) == 8192 // 140
    total = one.core.stats().total
    assert (total.records_sent, total.local_batches_sent) == (202, len(other.handler.batches))
    assert total.local_bytes_sent == 201 * 140 + 100_000
    assert other.core.stats().total.local_bytes_received == total.local_bytes_sent


def test_what_the_bound_keeps_back_for_too_long_is_dropped_oldest_first(world: World) -> None:
    one, other = roles(world, 2)
    flood(one, other, 8 * 200)
    one.control(other, [bytes(8000)] * 80, token=5000)
    one.turn()
    assert len(other.handler.control) == MAX_BATCHES, "control goes first"
    world.now += 0.3
    one.send(other, [make_record(9000)], token=9000)
    for _ in range(2):
        one.turn()
    assert other.handler.keys()[-1] == 9000
    assert (5000, True) in one.handler.settled
    lost = [token for token, handled in one.handler.settled if not handled]
    assert lost == sorted(lost)
    assert one.core.stats().dropped == {"push_back": len(lost)}
    assert len(other.handler.records) == 8 * 200 + 1 - len(lost)


def test_control_messages_wait_longer(world: World) -> None:
    one, other = roles(world, 2)
    one.control(other, [bytes(8000)] * 4 * MAX_BATCHES, token=1)
    one.turn()
    for later, dropped in ((0.3, 0), (4.8, MAX_BATCHES)):
        world.now += later
        one.turn()
        assert one.core.stats().total.queue_drops == dropped
    world.settle()
    assert (len(other.handler.control), one.handler.settled) == (3 * MAX_BATCHES, [(1, False)])


def test_how_long_a_batch_has_waited_is_told_when_it_is_handed_over(world: World) -> None:
    one, other = roles(world, 2)
    waited: list[float] = []
    one.core.outputs.waited = waited.append
    flood(one, other, 8 * MAX_BATCHES + 8)
    one.turn()
    world.now += 0.1
    one.turn()
    assert waited == [0.0] * MAX_BATCHES + [pytest.approx(0.1)]


def test_records_that_were_late_already_are_handed_over_if_the_bound_allows_it(world: World) -> None:
    one, other = roles(world, 2)
    one.send(other, [make_record(1)], token=1)
    world.now += 5.0
    one.turn()
    assert (other.handler.keys(), one.handler.settled) == ([1], [(1, True)])


@pytest.mark.parametrize(
    ("outcome", "records", "control"),
    [
        (Outcome.TAKEN, True, True),
        (Outcome.ANSWERED, False, True),
        (Outcome.NOT_TAKEN, False, False),
        (Outcome.MALFORMED, False, False),
    ],
)
def test_an_outcome_means_what_it_means_between_processes(world: World, outcome: Outcome, records: bool, control: bool) -> None:
    one, other = roles(world, 2)
    assert isinstance(other.handler, Acting)
    other.handler.outcome = other.handler.outcome_of_records = outcome
    one.send(other, [make_record(1)] * 3, token=1)
    one.control(other, [b"control"], token=2)
    world.settle()
    assert sorted(one.handler.settled) == [(1, records), (2, control)]
    assert one.core.stats().total.sent_lost == 3 * (not records) + (not control)
    assert sum(other.core.stats().refused.values()) == (not records) + (not control)


def test_a_parcel_of_several_batches_is_handled_only_if_all_of_it_was(world: World) -> None:
    one, other = roles(world, 2)

    def refuse() -> None:
        assert isinstance(other.handler, Acting)
        other.handler.outcome_of_records = Outcome.NOT_TAKEN if len(other.handler.batches) == 2 else Outcome.TAKEN

    acts(other, refuse)
    one.send(other, [make_record(number, 1000) for number in range(30)], token=1)
    one.send(other, [make_record(number, 1000) for number in range(30)], token=2)
    world.settle()
    assert one.handler.settled == [(1, False), (2, True)]


def test_a_handler_that_raises_loses_its_own_batch_alone(world: World) -> None:
    one, two, three = roles(world, 3)

    def raise_it() -> None:
        if len(two.handler.batches) == 1:
            raise ValueError("a bug")

    acts(two, raise_it)
    for token in (1, 2):
        one.send(two, [make_record(token, 8000)], token=token)
    one.send(three, [make_record(3)], token=3)
    world.settle()
    assert sorted(one.handler.settled) == [(1, False), (2, True), (3, True)]
    assert two.core.stats().refused == {"handler_raised": 1}


class Escape(BaseException):
    """What no guard for exceptions catches."""


def test_what_escapes_from_a_handler_loses_nothing_of_others(world: World) -> None:
    one, two, three = roles(world, 3)

    def escape() -> None:
        two.serving = False
        raise Escape

    acts(two, escape)
    one.send(two, [make_record(1)], token=1)
    one.send(three, [make_record(3)], token=3)
    with pytest.raises(Escape):
        one.turn()
    acts(two, lambda: None)
    world.settle()
    assert sorted(one.handler.settled) == [(1, False), (3, True)]
    assert three.handler.keys() == [3]


def test_peers_are_alive_at_once_and_exchange_attachments_as_heartbeats_do(world: World) -> None:
    one, other = world.node(1), world.node(2)
    other.handler.answer = b"subscribed"
    one.know(other)
    one.core.set_attachment(other.id, b"partition 3", world.now)
    assert one.core.state(other.id) is PeerState.ALIVE
    one.turn()
    assert one.handler.states == [(other.id, PeerState.ALIVE)]
    assert other.handler.heartbeats == [(one.id, False, b"partition 3")], "the newest"
    assert one.handler.heartbeats == [(other.id, True, b"subscribed")]
    assert other.core.state(one.id) is PeerState.UNKNOWN, "it was never set there"
    assert other.handler.states == []
    assert not one.core.introduce(world.now, unanswered=True), "nobody is waited for"


def test_heartbeats_come_at_their_interval_and_when_an_attachment_changes(world: World) -> None:
    one, other = roles(world, 2)
    before = len(other.handler.heartbeats)
    world.advance(3.2, step=0.05)
    assert other.handler.heartbeats[before:].count((one.id, False, b"")) == 3
    before = len(other.handler.heartbeats)
    for _ in range(2):
        one.core.set_attachment(other.id, b"new", world.now)
        world.settle()
    assert other.handler.heartbeats[before:] == [(one.id, False, b"new")]
    assert one.core.next_deadline() <= world.now + 1.0
    with pytest.raises(InvalidArgument, match="512"):
        one.core.set_attachment(other.id, bytes(513), world.now)


def test_a_role_that_closes_is_dead_at_once_and_what_waits_for_it_settles(world: World) -> None:
    one, other = roles(world, 2)
    one.send(other, [make_record(1)], token=1)
    other.send(one, [make_record(2)], token=2)
    other.core.close_port(world.now)
    assert other.handler.settled == [(2, False)]
    one.turn()
    assert one.core.state(other.id) is PeerState.DEAD
    assert one.handler.states[-1] == (other.id, PeerState.DEAD)
    assert one.handler.settled == [(1, False)]
    one.send(other, [make_record(3)], token=3)
    one.turn()
    assert one.handler.settled[-1] == (3, False)
    assert one.core.stats().dropped == {"peer_dead": 2}
    assert one.handler.records == other.handler.records == []
    counts = one.core.stats().total.queue_drops
    one.know()
    assert one.core.state(other.id) is PeerState.UNKNOWN
    assert one.core.stats().total.queue_drops == counts == 2, "no counter goes back"


def test_what_a_closing_role_sent_settles_although_its_receiver_has_not_passed_it_on(world: World) -> None:
    gateway, proxy, broker = roles(world, 3)
    acts(proxy, lambda: flood(proxy, broker, 16 * MAX_BATCHES), at_end=True)
    gateway.control(proxy, [b"publish"], token=1)
    gateway.turn()
    assert gateway.handler.settled == []
    gateway.core.close_port(world.now)
    assert gateway.handler.settled == [(1, False)]
    acts(proxy, lambda: None)
    world.settle()
    assert gateway.handler.settled == [(1, False)], "once"


def test_a_peer_in_the_process_is_perfect_and_known(world: World) -> None:
    one, other = roles(world, 2)
    assert one.core.quality(other.id) == PERFECT
    assert one.core.layout_of(other.id) == 2
    assert (one.core.role_of(other.id), one.core.role_of(EndpointID(77))) == ("router", "")
    assert one.core.peer_states() == {PeerState.ALIVE: 1}
    peer = one.core.stats().peers[other.id]
    assert (peer.role, peer.state, peer.queued_bytes) == ("router", PeerState.ALIVE, 0)


def test_the_metrics_show_what_was_handed_over(world: World) -> None:
    one, other = roles(world, 2)
    one.send(other, [make_record(1)] * 3)
    world.settle()
    metrics = Metrics("proxy")
    metrics.collect_from(lambda: link_samples(*one.core.stats_by_peer(), lambda _: "broker:x"))
    text = asyncio.run(metrics.render()).decode().replace('role="proxy",', "").replace('{role="proxy"}', "")
    for line in (
        "pixiu_proxy_links_local_batches_sent_total 1.0",
        "pixiu_proxy_links_local_bytes_sent_total 420.0",
        "pixiu_proxy_links_records_sent_total 3.0",
        'pixiu_proxy_peer_local_batches_sent_total{peer="broker:x"} 1.0',
        'pixiu_proxy_peer_up{peer="broker:x"} 1.0',
    ):
        assert line in text.splitlines(), text


def test_a_handler_runs_in_the_context_of_its_role(world: World) -> None:
    role: contextvars.ContextVar[str] = contextvars.ContextVar("role")
    seen: list[str] = []
    one, other = roles(world, 2)
    for node, name in ((one, "gateway"), (other, "proxy")):
        context = contextvars.Context()
        context.run(role.set, name)
        node.core.port.run = context.run
        acts(node, lambda: seen.append(role.get()))

    def pass_on() -> None:
        seen.append(role.get())
        other.send(one, [make_record(2)])

    acts(other, pass_on)
    one.send(other, [make_record(1)])
    one.turn()
    assert seen == ["proxy", "gateway"]


def test_a_process_elsewhere_is_reached_as_before(world: World) -> None:
    """Where the switch does not know an endpoint, it is a matter of datagrams."""
    here, far = roles(world, 1)[0], Node(World(), 9, LinkOptions(), b"0123456789abcdef")
    here.know(far)
    here.send(far, [make_record(1)])
    here.control(far, [b"control"])
    assert len(here.turn()) == 2
