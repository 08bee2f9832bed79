"""Section 2.2: proxies forward to the brokers of a partition; pipelines; big rooms."""

from __future__ import annotations

import pytest

from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "a room leads to one partition, and in it to one replica (by rendezvous hashing, not by a modulus)": (
        "proxy/proxy_core::records_go_to_the_partition_of_their_key_in_order",
        "proxy/proxy_core::inside_a_partition_rendezvous_hashing_names_the_replica",
        "pixiu/placement/partition::a_death_moves_only_the_dead_replicas_keys",
    ),
    "nothing is forwarded to a replica whose heartbeats time out while there is another": (
        "proxy/proxy_core::a_doubted_replica_is_chosen_only_when_there_is_no_other",
    ),
    "only brokers in state Running get messages": (
        "pixiu/discovery/node_layout_and_view::a_view_answers_by_role_partition_state_and_endpoint",
    ),
    "when the number of partitions grows, proxies send to the new ones": (
        "e2e/stale_senders::a_proxy_and_a_gateway_without_watches_lose_nothing_and_learn_of_a_doubling",
        "proxy/proxy_core::a_joining_replica_gets_its_rooms_only_after_the_old_one_has_handled_what_it_got",
    ),
    "heartbeats and messages share a thread, so that a hung process is found": (
        "e2e/hung::a_hung_process_is_found_and_comes_back_clean",
        "cluster/process/process_lifecycle::a_loop_that_hangs_loses_its_place_at_once_and_takes_a_new_one_when_it_is_back",
    ),
    "a big room is 64 virtual rooms, and other modules do not change": (
        "pixiu/placement/big_rooms::a_user_of_a_big_room_is_in_one_of_its_64_vrooms",
        "proxy/big_rooms::a_message_leaves_once_for_each_vroom_with_the_same_id",
        "proxy/signals::copies_of_a_signal_to_a_big_room_reach_each_vroom_by_different_replicas",
        "e2e/edges::a_big_room_reaches_every_member_once_and_in_order",
    ),
    "a message to a big room does not hold up other rooms": (
        "proxy/big_rooms::copies_keep_the_pace_and_other_rooms_overtake_them",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])
