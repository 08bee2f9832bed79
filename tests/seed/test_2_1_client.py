"""Section 2.1: clients publish through proxies."""

from __future__ import annotations

import pytest

from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "a client learns of all proxies, and of new ones while it runs": (
        "pixiu/client/connecting::the_map_is_refreshed_in_intervals_and_new_proxies_are_used",
        "pixiu/client/connecting::the_map_is_refreshed_when_a_connection_fails",
    ),
    "watches and polls of the registry make up for each other": (
        "pixiu/discovery/discovery_with_zookeeper::a_watch_sees_registrations_states_layouts_and_new_partitions",
        "pixiu/discovery/discovery_with_zookeeper::a_poll_alone_finds_what_no_watch_told",
    ),
    "a proxy that does not answer in time is left": (
        "pixiu/client/publishing::a_hung_proxy_is_left_in_time",
        "pixiu/client/sender_core::a_silent_proxy_is_left",
    ),
    "every message gets a Snowflake ID from its client": (
        "pixiu/ids::a_snowflake_holds_its_time_and_worker_and_leaves_the_top_bit",
        "pixiu/client/publishing::message_ids_use_the_lent_worker_number_which_is_given_back_at_the_end",
    ),
    "messages are spread over the proxies": (
        "pixiu/client/sender_core::the_proxy_of_a_key_is_key_modulo_proxies_and_streams_open_on_demand",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])
