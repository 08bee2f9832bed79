"""Section 7: relays know where users are, and carry messages to users."""

from __future__ import annotations

import pytest

from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "a connect and a disconnect go to the relay of the user": (
        "gateway/gateway_devices::a_device_that_connects_is_told_with_its_connect_time",
        "gateway/gateway_devices::the_last_connection_of_a_device_disconnects_it",
        "relay/relay_core::a_connect_is_kept_and_confirmed",
    ),
    "users are spread over partitions; replicas of one have the same data": (
        "relay/relay_core::what_a_peer_forwards_is_kept_and_not_sent_back",
        "cluster/membership/devices::any_order_loss_of_none_and_repetition_give_the_same_map",
    ),
    "relay data is written to a database, and loaded at the start": (
        "relay/relay_db::what_was_written_is_loaded_whole",
        "relay/relay_core::a_new_replica_takes_what_a_running_one_has_before_it_runs",
    ),
    "a chat message goes to the gateways where its user is": (
        "relay/relay_core::a_message_goes_once_to_each_gateway_of_the_users_devices",
    ),
    "a message to a room goes by the broker to relays with a list of users, and from there to gateways": (
        "broker/multicast::each_partition_of_users_gets_one_copy_with_its_users",
        "relay/relay_core::a_rooms_message_goes_once_to_each_gateway_of_its_users",
        "e2e/relay_cluster::a_room_of_many_members_on_both_gateways_gets_each_message_once",
    ),
    "a message to a user who is offline is dropped (and its sender is told)": (
        "relay/relay_core::the_sender_is_told_which_messages_nobody_took",
        "proxy/offline_notices::who_was_offline_fails_and_the_rest_is_accepted",
    ),
    "a proxy tells messages to rooms from messages to users": (
        "proxy/offline_notices::messages_to_users_go_to_the_relay_of_their_partition_and_others_to_brokers",
        "proxy/offline_notices::a_proxy_for_some_kinds_takes_those",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])
