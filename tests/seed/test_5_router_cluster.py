"""Section 5: routers as a cluster of their own, with partitions and replicas without a leader."""

from __future__ import annotations

import pytest

from pixiu.ids import gateway_generation, gateway_instance, gateway_msg_id
from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "brokers subscribe at a replica by their heartbeats, and only then it forwards to them": (
        "router/core::a_heartbeat_alone_opens_no_subscription",
        "router/core::a_subscription_ends_after_four_missed_heartbeats",
    ),
    "a change goes to the peers first, then to subscribers, then to the database": (
        "router/core::peers_come_first_then_subscribers_then_the_database_then_the_confirmation",
    ),
    "while routers double, a change goes to the old and to the new partition": (
        "gateway/gateway_core::while_routers_double_both_partitions_must_confirm",
        "router/core::a_new_partition_takes_its_snapshot_from_the_parent_and_heartbeats_it",
    ),
    "a GatewayMsgID is unique and grows: 16 bits of instance, 10 of generation, 38 of counter": (
        "pixiu/ids::a_gateway_message_id_holds_instance_generation_and_counter",
        "registry/instance_leases::under_contention_every_instance_has_one_holder",
    ),
    "a change with a lower ID is dropped (of each room and user, not of each gateway)": (
        "cluster/membership/membership::a_repeated_and_an_overtaken_message_change_nothing",
        "cluster/membership/membership::a_login_of_another_room_with_a_lower_id_still_applies",
    ),
    "what comes in Init is queued and replayed": (
        "router/core::messages_that_come_in_init_are_queued_and_replayed_after_the_snapshot",
    ),
    "brokers and routers have partitions of their own, each a power of two": (
        "pixiu/placement/partition::every_room_of_a_broker_is_known_to_a_router_that_it_meets",
        "broker/core::it_feeds_from_every_router_partition_that_shares_rooms",
    ),
    "when its router dies, a broker moves to another one": (
        "broker/core::when_its_router_dies_it_moves_to_another_and_keeps_serving",
    ),
    "with fewer than three members here, a change goes twice, 10 ms apart": (
        "gateway/gateway_heals::a_change_of_a_room_with_few_members_goes_twice_ten_milliseconds_apart",
        "gateway/gateway_heals::a_change_of_a_room_with_enough_members_goes_once",
    ),
    "a message for members who are gone is answered, and they are taken out (negative feedback)": (
        "gateway/gateway_heals::a_record_for_a_room_without_members_is_answered_to_its_router_once_a_second",
        "router/router_heals::feedback_drops_what_is_not_newer_and_goes_on_to_peers_and_brokers",
        "broker/broker_heals::feedback_takes_effect_on_the_next_record",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])


def test_a_gateways_ids_grow_with_its_counter_and_with_its_generation() -> None:
    first, later, restarted = gateway_msg_id(7, 1, 1), gateway_msg_id(7, 1, 2), gateway_msg_id(7, 2, 1)
    assert first < later < restarted
    assert (gateway_instance(restarted), gateway_generation(restarted)) == (7, 2)
    assert restarted >> 48 == 7
