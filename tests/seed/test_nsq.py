"""NSQ: headers, isolation, filters, and what its authors planned."""

from __future__ import annotations

import pytest

from tests.seed.index import Row, Rows, missing

ROWS: Rows = {
    "N1": Row(
        "a message has the server's time, the number of its deliveries, an ID and a body; the format is simple [and has a CRC]",
        (
            "pixiu/wire/block::the_layout_is_fixed",
            "pixiu/wire/block::a_stamp_says_where_when_and_who",
            "pixiu/wire/block::any_changed_byte_is_found",
            "topic/clients/deliveries::attempts_are_named_from_the_second_on",
            "e2e/topic_group::blocks_are_written_read_and_consumed",
            "fuzz/nsq_fuzz::an_id_stands_for_one_position",
            "e2e/nsq::clients_publish_consume_and_give_back",
        ),
        "Blocks are not compressed: neither Python 3.11 nor a dependency brings zstd.",
    ),
    "N2": Row(
        "headers stand beside the body, free of business, with a version and a length [and a flag says that there are some]",
        (
            "pixiu/wire/block::what_was_encoded_is_read_in_place",
            "pixiu/wire/vectors::the_page_of_topics_is_enough_to_make_each_block",
            "pipeline/topic_columns::every_field_is_in_its_column",
            "nsqdoor/session::a_transcript",
            "fuzz/nsq_fuzz::headers_come_back_as_they_were",
        ),
        "JSON has version 4 in frames, as in Youzan's code, and not 1, as in the article.",
    ),
    "N3": Row(
        "a topic gets messages with headers without a change of its producers and consumers",
        (
            "topic/dispatch/sorting::what_a_filter_does_not_want_is_acknowledged_by_one_entry",
            "e2e/durable_topics::everything_sent_is_read_and_delivered_to_each_channel",
            "nsqdoor/session::a_transcript",
        ),
        "A listener strips or requires headers for all of its topics: there is no setting of a topic.",
    ),
    "N4": Row(
        "producers mark messages of load tests; consumers pass or block them [the server does, as a member asks]",
        (
            "topic/dispatch/sorting::messages_of_load_tests_are_for_who_asks_for_them",
            "topic/core_channels::members_learn_why_they_are_refused",
            "e2e/durable_topics::marked_messages_come_to_members_and_readers_that_ask_for_them",
            "pixiu/client/load_tests::a_subscription_gets_what_it_asks_for",
            "pixiu/client/load_tests::what_a_handler_sends_has_the_mark_of_what_it_handles",
            "gateway/gateway_core::messages_of_load_tests_do_not_come_to_mqtt_clients",
            "e2e/inboxes::load_tests_come_only_to_those_who_ask_for_them",
        ),
    ),
    "N5": Row(
        "load tests are not isolated: a wrong mark or too much is washed out by consuming back",
        (
            "topic/core_channels::what_a_load_test_left_is_washed_out_by_consuming_back",
            "topic/state/state::a_seek_moves_the_floor_either_way",
            "topic/core_channels::a_seek_voids_what_members_have",
            "pixiu/client/load_tests::an_inbox_acknowledges_what_it_does_not_give",
            "gateway/mail::mail_of_load_tests_is_acknowledged_for_mqtt_clients",
        ),
    ),
    "N6": Row(
        "stable and feature versions share a topic, without stopping either one's consumers",
        (
            "topic/dispatch/sorting::a_lane_goes_on_with_the_member_whose_turn_it_is",
            "topic/dispatch/sorting::a_member_with_a_tag_gets_what_nobody_has_had_yet",
        ),
        "examples/ has no program that shows it.",
    ),
    "N7": Row(
        "the server delivers by the tag in a message's head",
        (
            "topic/dispatch/sorting::tagged_messages_go_to_members_with_the_tag",
            "pixiu/wire/block::what_was_encoded_is_read_in_place",
        ),
    ),
    "N8": Row(
        "no consumer has the message's tag: it goes to those without one, also what a leaving one had",
        (
            "topic/dispatch/sorting::tagged_messages_go_to_members_with_the_tag",
            "topic/dispatch/sorting::what_a_tagged_member_had_goes_to_others_when_it_leaves",
            "sim/topics/topics_under_faults::everything_confirmed_is_read_once_and_in_order",
        ),
    ),
    "N9": Row(
        "a consumer has the message's tag: it goes there, and several with one tag compete",
        (
            "topic/dispatch/sorting::tagged_messages_go_to_members_with_the_tag",
            "topic/dispatch/sorting::members_with_one_tag_share_its_messages",
        ),
    ),
    "N10": Row(
        "a message without a tag goes to consumers without one; if there is none, it waits, and that is said",
        ("topic/dispatch/sorting::tagged_messages_go_to_members_with_the_tag",),
    ),
    "N11": Row(
        "every channel gets everything; inside of one, consumers compete",
        (
            "topic/core_channels::a_channel_without_a_filter_gets_everything",
            "topic/dispatch/dispatcher::members_share_by_credit",
            "e2e/durable_topics::everything_sent_is_read_and_delivered_to_each_channel",
        ),
    ),
    "N12": Row(
        "a channel has one filter; what lacks the key goes to channels without one; what does not match counts as consumed",
        (
            "topic/core_channels::a_channel_without_a_filter_gets_everything",
            "topic/core_channels::members_learn_why_they_are_refused",
            "pixiu/wire/filters::messages_match_as_the_conditions_say",
            "pixiu/wire/filters::a_message_without_the_header_never_matches",
            "topic/dispatch/sorting::what_a_filter_does_not_want_is_acknowledged_by_one_entry",
        ),
        "What a filter, a mark or an expiry acknowledged is not counted by reason.",
    ),
    "N13": Row(
        "a migration proxy stands for both clusters' look-ups and merges answers; clients say if they read or write",
        (
            "nsqdoor/phases::each_phase_names_the_sides_of_the_page",
            "nsqdoor/phases::answers_are_merged_by_address",
            "e2e/nsq::a_topic_moves_in_three_phases",
        ),
    ),
    "N14": Row(
        "phase 1: consumers get both clusters, producers the old one",
        ("nsqdoor/phases::each_phase_names_the_sides_of_the_page", "e2e/nsq::a_topic_moves_in_three_phases"),
        "The suite has a listener as the old side; tests/clients/nsq/migration.py has a real nsqd and four client libraries.",
    ),
    "N15": Row(
        "phase 2: producers get the new one, consumers both [refused while the new side lacks the topic or a channel]",
        ("nsqdoor/phases::a_step_forth_has_conditions", "e2e/nsq::a_topic_moves_in_three_phases"),
    ),
    "N16": Row(
        "phase 3, once the old one is empty: all get the new one [refused before that, unless it is forced]",
        ("nsqdoor/phases::a_step_forth_has_conditions", "e2e/nsq::a_topic_moves_in_three_phases"),
        "Connections to the old side end as clients do it when a look-up no longer names an nsqd, and not by the proxy.",
    ),
    "N17": Row(
        "Spark consumes topics",
        (
            "pipeline/spark_topics::a_batch_is_what_was_written",
            "pipeline/spark_topics::a_stream_reads_once_while_parts_come_and_go",
            "pipeline/topic_lineage::every_row_is_read_once_and_in_the_order_of_its_slot",
        ),
    ),
    "N18": Row(
        "a sink's target is configuration, and what the target does not take is kept and tried again [our topic is what keeps it]",
        (
            "bridge/simulation::everything_is_written_in_order_or_is_a_dead_letter",
            "e2e/bridge::a_webhook_and_files_get_everything_in_order_through_failures_kills_and_pauses",
            "e2e/bridge::topics_go_through_an_nsqd_that_is_restarted",
            "bridge/nsq::what_nsq_never_takes_is_told",
            "tools/tail/core::a_renamed_file_is_read_to_its_end_before_the_new_one",
            "tools/tail/core::the_oldest_rotated_files_are_given_up_above_the_bound",
        ),
    ),
    "N19": Row(
        "a token bucket for each topic, so that one topic's traffic spares the others",
        (
            "topic/core::a_topic_has_its_own_rate",
            "e2e/topic_admin::writers_wait_for_the_rate_of_their_topic",
            "topic/dispatch/paces::a_channel_gives_what_the_rate_allows_and_all_of_it_once",
            "topic/dispatch/paces::a_reader_waits_for_the_rate_or_is_told_when_to_come_back",
        ),
        "A channel has no rate of its own.",
    ),
    "N20": Row(
        "one subscription takes many messages, and one acknowledgement settles them",
        (
            "topic/core::members_get_messages_after_the_leaders_first_entry_and_answers_after_the_commit",
            "pixiu/client/topics/member_core::acknowledgements_of_a_turn_are_one_report_of_ranges",
            "topic/dispatch/dispatcher::a_range_over_everything_settles_what_the_member_has",
            "topic/state/acks::many_ranges_at_once_are_the_same",
        ),
    ),
    "N21": Row(
        "producing, and what is done to channels, have checks of their own and are in an audit log",
        (
            "e2e/topic_admin::rules_say_who_may_do_what_with_a_topic",
            "e2e/topic_group::rules_hold_and_the_sender_is_the_login",
        ),
    ),
    "N24": Row(
        "filters by content that are too special for the core are programs outside of it",
        (
            "pixiu/wire/filters::what_is_no_filter_is_refused",
            "topic/core_channels::a_filter_is_checked_before_it_comes_into_the_log",
            "pixiu/wire/expressions::each_means_what_it_says",
            "pixiu/wire/expressions::random_ones_match_as_a_model_says_and_the_search_for_bytes_changes_nothing",
            "topic/dispatch/sorting::an_expression_chooses_and_messages_without_a_value_are_counted",
        ),
        "A program between a channel and another topic is an ordinary client: docs/topics.md has one, and none is shipped.",
    ),
    "N25": Row(
        "topics are independent of each other",
        (
            "topic/dispatch/sorting::only_some_messages_are_looked_at_in_a_turn",
            "topic/storage/store::a_thousand_parts_share_a_group",
            "topic/core::a_topic_has_its_own_rate",
        ),
    ),
    "N26": Row(
        "deliveries are counted; messages can be delayed, put off, consumed again, and end among dead letters",
        (
            "topic/dispatch/dispatcher::a_refused_message_comes_again_after_its_delay",
            "topic/dispatch/dispatcher::attempts_end_among_the_dead_letters",
            "topic/dispatch/sorting::a_message_waits_for_its_time_and_holds_up_nobody_else",
            "topic/core_channels::a_seek_voids_what_members_have",
            "topic/core_channels::resent_dead_letters_are_delivered_as_if_for_the_first_time",
            "e2e/durable_topics::a_failing_message_comes_again_and_then_is_a_dead_letter",
        ),
    ),
    "N27": Row(
        "very many topics share one cluster",
        (
            "topic/storage/store::a_thousand_parts_share_a_group",
            "topic/state/state::a_group_knows_ten_thousand_topics_and_no_more",
            "pixiu/placement/slots::parts_that_do_not_fit_together_are_refused",
            "registry/topics::a_node_has_a_limit",
        ),
        "No test has a whole cluster with 10,000 topics: the parts of one group are the unit, and groups share nothing.",
    ),
}


@pytest.mark.parametrize("number", ROWS)
def test_the_row_has_its_tests_or_a_reason(number: str) -> None:
    row = ROWS[number]
    assert row.proofs or row.reason
    assert not missing(row.proofs)
