"""Deaths and rejoins as the replay sees them, and the counters of the links."""

from __future__ import annotations

from collections import Counter

from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.ids import UIN, EndpointID
from tools.load.verdict import Death
from tools.replay.run import deaths_with_users
from tools.replay.users import Break
from tools.replay.watch import DeathBook, link_counts

LAYOUT = Layout(1, {"broker": RoleLayout(1, 1, 2)})


def broker(endpoint: int, port: int, state: NodeState = NodeState.RUNNING) -> Node:
    return Node("broker", 0, endpoint, state, "127.0.0.1", port, port + 1, EndpointID(endpoint), 1, "", "", 0)


def view(*nodes: Node) -> View:
    return View(LAYOUT, nodes)


def test_a_death_is_over_when_the_wanted_replicas_are_running_beside_the_dead_one() -> None:
    book = DeathBook()
    first, second = broker(1, 7000), broker(2, 7010)
    book.on_view(view(first, second), 0)
    assert not book.is_orderly(1)
    death = book.died(first, 100)
    book.on_view(view(first, second), 150)  # the registry still lists the dead one
    assert death.rejoin_us is None
    book.on_view(view(first, second, broker(3, 7000, NodeState.INIT)), 200)
    assert death.rejoin_us is None
    book.on_view(view(first, second, broker(3, 7000)), 300)
    assert death.rejoin_us == 300
    assert (death.name, death.death_us) == ("broker 0/1", 100)


def test_a_process_that_drains_or_leaves_the_registry_itself_did_not_die() -> None:
    book = DeathBook()
    book.on_view(view(broker(1, 7000), broker(2, 7010)), 0)
    book.on_view(view(broker(1, 7000, NodeState.DRAINING), broker(2, 7010)), 10)
    assert book.is_orderly(1)
    book.on_view(view(broker(2, 7010)), 20)
    assert book.is_orderly(1)


def test_a_process_whose_successor_took_its_address_did_die() -> None:
    book = DeathBook()
    book.on_view(view(broker(1, 7000), broker(2, 7010)), 0)
    book.on_view(view(broker(3, 7000), broker(2, 7010)), 10)
    assert not book.is_orderly(1)


def test_a_gateways_window_lasts_until_its_last_user_is_back() -> None:
    def gateway_death() -> Death:
        return Death("gateway 0", "gateway", -1, 9, 100, 200)

    breaks = [Break(UIN(1), 9, 100, "reset", 250), Break(UIN(2), 9, 101, "reset", 180), Break(UIN(3), 8, 101, "reset", 900)]
    death = deaths_with_users([gateway_death()], breaks)[0]
    assert (death.users, death.rejoin_us) == (frozenset([1, 2]), 250)
    open_death = deaths_with_users([gateway_death()], [*breaks, Break(UIN(4), 9, 102, "reset", None)])[0]
    assert open_death.rejoin_us is None
    assert UIN(5) not in deaths_with_users([gateway_death()], [])[0].users
    assert deaths_with_users([gateway_death()], [])[0].users, "an empty set would mean that it concerns everybody"


def test_link_counters_are_summed_by_the_peers_role() -> None:
    page = b"""
pixiu_broker_peer_records_sent_total{peer="gateway:127.0.0.1:1"} 5.0
pixiu_broker_peer_records_sent_total{peer="gateway:127.0.0.1:2"} 6.0
pixiu_broker_peer_records_received_total{peer="proxy:127.0.0.1:3"} 7.0
pixiu_broker_peer_records_received_total{peer="unknown:00000000000000aa"} 2.0
pixiu_broker_peer_lost_items{peer="proxy:127.0.0.1:3"} 8.0
pixiu_broker_peer_queue_drops_total{peer="gateway:127.0.0.1:1"} 9.0
pixiu_broker_links_records_sent_total 11.0
"""
    roles = {"00000000000000aa": "proxy"}
    assert link_counts(page, "broker", lambda endpoint: roles[endpoint]) == Counter(
        {
            ("sent", "gateway"): 11,
            ("received", "proxy"): 9,
            ("lost by receiver", "proxy"): 8,
            ("lost by sender", "gateway"): 9,
        }
    )
