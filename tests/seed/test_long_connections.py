"""Long-connection gateways: Zhihu's (Z) and Tengruan's (T)."""

from __future__ import annotations

import pytest

from tests.seed.index import Row, Rows, missing

FOUR_CASES = "e2e/routes::the_four_cases_lose_and_repeat_nothing_while_a_proxy_and_the_bridge_are_killed"
ROWS: Rows = {
    "Z1": Row(
        "one system of long connections for notices, messages, comments, games and places",
        (
            "e2e/examples::every_player_sees_every_signal_once",
            "e2e/examples::both_devices_show_every_mail_and_a_dead_letter_is_sent_again",
            "e2e/examples::devices_at_home_are_shown_live_and_their_alarms_reach_those_who_bound_them",
        ),
        "Examples of live comments and of quotes are not there.",
    ),
    "Z2": Row(
        "one connection carries all",
        ("e2e/gateway_mail::a_stock_mqtt_client_gets_mail_with_qos_1_and_acknowledges_it_in_any_order",),
    ),
    "Z3": Row(
        "each business has its authentication, permissions and quotas",
        (
            "cluster/access/rules::a_rule_is_for_users_groups_and_claims",
            "cluster/access/rules::a_group_has_a_quota_of_its_own_and_the_rest_of_the_common_one",
            "e2e/tenants::nothing_of_one_tenant_reaches_the_other",
            "cluster/access/tenants::rules_are_in_the_tenants_names_and_reach_no_further",
        ),
        "A tenant has no issuer of tokens of its own.",
    ),
    "Z4": Row(
        "the protocol stays compatible as it evolves",
        (
            "e2e/rolling_upgrade::every_process_is_upgraded_while_rooms_and_mail_flow",
            "e2e/clients_chat::mqtt_5_reaches_every_dialect_on_another_gateway_with_its_qos_and_properties",
        ),
    ),
    "Z5": Row(
        "bursts of mass sends do not hurt others",
        (
            "e2e/edges::a_publisher_over_its_rate_is_told_when_to_try_again",
            "e2e/edges::a_big_room_reaches_every_member_once_and_in_order",
            "gateway/tenants::the_tenant_most_above_its_share_is_shed_first_and_refused_last",
        ),
        "There is no forecast by tenant.",
    ),
    "Z6": Row(
        "clients and back ends agree on a topic; the payload is opaque",
        ("e2e/clients_chat::the_sdk_and_mqtt_meet_in_a_room", "pixiu/placement/topic_rooms::devices_are_spread_over_all_brokers"),
    ),
    "Z7": Row("publishing and subscribing are permitted by topic", ("cluster/access/rules::the_first_rule_that_fits_decides",)),
    "Z8": Row(
        "the owner of a topic is asked by HTTP",
        (
            "cluster/access/callbacks::a_callback_is_asked_by_topic_and_by_device",
            "cluster/access/callbacks::a_callback_of_rules_that_hangs_lies_or_floods_allows_nothing",
        ),
    ),
    "Z9": Row("topic templates with the user's name are decided locally", ("cluster/access/rules::topics_by_filter_and_template",)),
    "Z10": Row(
        "important messages are sent again until the client has receipted them, both ways",
        (
            "e2e/mail_mqtt::paho_gets_everything_that_was_sent_while_it_was_away_across_a_gateways_death",
            "gateway/qos1_overload::what_is_refused_for_now_goes_again_in_order_and_closes_nobody",
            "e2e/stock_clients::paho_plays_the_script",
        ),
        "Messages of topics are kept while the connection lasts; those for later are mail.",
    ),
    "Z11": Row(
        "bulk traffic uses a queue, not one receipt a message",
        ("e2e/durable_topics::everything_sent_is_read_and_delivered_to_each_channel",),
    ),
    "Z12": Row(
        "stock client libraries of all platforms serve",
        ("e2e/stock_clients::paho_plays_the_script", "e2e/stock_clients::mosquittos_clients_play_the_script"),
        "`tests/clients` has six more clients, which the suite does not run.",
    ),
    "Z13": Row(
        "storage, compute and routing are parts of their own", ("import_graph::the_product_keeps_the_rules_and_the_page_shows_it",)
    ),
    "Z14": Row(
        "few states in processes",
        ("e2e/mail_mqtt::paho_gets_everything_that_was_sent_while_it_was_away_across_a_gateways_death",),
        "There is no image and no chart here.",
    ),
    "Z15": Row(
        "kept messages are bounded, and gaps are told",
        ("gateway/mail::a_marker_is_passed_on_and_of_what_the_inbox_dropped_releases_what_waits",),
    ),
    "Z16": Row(
        "access layer, brokers, a store of sessions, a queue",
        ("e2e/gateway_mail::a_stock_mqtt_client_gets_mail_with_qos_1_and_acknowledges_it_in_any_order",),
        "Pi keeps sessions of mail; those of topics end with their connections.",
    ),
    "Z17": Row(
        "connections are spread evenly over brokers",
        ("e2e/clients_chat::the_sdk_finds_the_cluster_through_any_proxy",),
        "For MQTT a balancer in front does it.",
    ),
    "Z18": Row(
        "a client comes back to the same broker",
        reason="Balancers in front choose the gateway; their configurations are tested with them, and not here.",
    ),
    "Z19": Row("the balancer reads the client ID in the first packet", reason="As Z18."),
    "Z20": Row(
        "a queue inside takes the peaks",
        ("e2e/durable_topics::everything_sent_is_read_and_delivered_to_each_channel", FOUR_CASES),
    ),
    "Z21": Row(
        "brokers publish by routes and consume by subscriptions, set apart",
        (
            "cluster/routes/routes::the_first_route_that_takes_a_topic_or_room_decides",
            "cluster/routes/routes::a_changed_file_is_taken_once_it_stands_still_audited_and_a_wrong_one_changes_nothing",
        ),
    ),
    "Z22": Row(
        "case 1: routed, not consumed",
        (FOUR_CASES, "proxy/routed::it_is_accepted_when_it_is_replicated_and_no_broker_gets_it"),
    ),
    "Z23": Row(
        "case 2: routed and consumed, in one order",
        (FOUR_CASES, "proxy/routed_order::clients_get_the_order_of_the_log_once_and_all_of_it"),
    ),
    "Z24": Row("case 3: consumed only", (FOUR_CASES, "bridge/clients::an_id_follows_from_the_place_of_the_message")),
    "Z25": Row(
        "case 4: routed to one topic, consumed from another",
        (FOUR_CASES, "proxy/routed::routes_that_feed_one_another_end_if_headers_are_carried_on"),
    ),
    "Z26": Row(
        "what is routed is reliable",
        (
            FOUR_CASES,
            "proxy/routed::a_topic_that_is_away_makes_its_publisher_wait_and_then_try_again_without_a_second_copy",
            "proxy/routed_order::a_planted_fault_is_found",
        ),
    ),
    "Z27": Row(
        "what arrives is looked up in local subscriptions",
        (
            "gateway/filters::a_wildcard_gets_what_it_matches_and_exact_filters_go_on",
            "pixiu/placement/filter_tree::a_tree_matches_what_a_naive_matcher_does",
        ),
    ),
    "Z28": Row(
        "the session keeps what is important outside, and deletes it at the ACK",
        ("gateway/mail_lane::what_was_written_waits_until_it_is_acknowledged_in_any_order",),
        "Mail only: no rule makes messages of a topic important.",
    ),
    "Z29": Row(
        "any broker resumes a session after a crash",
        (
            "e2e/mail_mqtt::paho_gets_everything_that_was_sent_while_it_was_away_across_a_gateways_death",
            "e2e/wills::a_will_is_published_once_when_the_connection_or_its_gateway_is_lost",
        ),
        "Mail, and wills; subscriptions are made again by the client.",
    ),
    "Z30": Row(
        "a sliding window, ordered as TCP is",
        ("gateway/mail_lane::nothing_beyond_the_window_is_written_nor_behind_it_before_it_has_come_again",),
    ),
    "Z31": Row(
        "no resend while connected; the window after a reconnect; receivers drop repeats",
        (
            "gateway/mail::a_relay_that_asks_is_told_up_to_where_mail_was_written",
            "gateway/mail::a_higher_session_begins_anew_and_marks_what_the_connection_was_written_before",
        ),
    ),
    "T1": Row(
        "alarms are known at once, and so is a device that is lost",
        (
            "e2e/examples::devices_at_home_are_shown_live_and_their_alarms_reach_those_who_bound_them",
            "e2e/wills::a_will_is_published_once_when_the_connection_or_its_gateway_is_lost",
        ),
        "The time of an alarm is not asserted.",
    ),
    "T2": Row("short connections, too", reason="The HTTP API has its tests with it, and not here."),
    "T3": Row(
        "devices upload data",
        (
            "e2e/examples::devices_at_home_are_shown_live_and_their_alarms_reach_those_who_bound_them",
            FOUR_CASES,
            "cluster/routes/recording::a_route_is_added_and_a_wrong_one_leaves_the_file_as_it_was",
        ),
    ),
    "T4": Row(
        "a user may subscribe once the device is bound",
        (
            "e2e/examples::devices_at_home_are_shown_live_and_their_alarms_reach_those_who_bound_them",
            "docs/examples::the_rules_of_the_devices_at_home_ask_about_what_is_bound_and_nothing_else",
        ),
        "That the end of a binding ends a subscription is tested with the HTTP API.",
    ),
    "T5": Row(
        "an access layer and a queue of one's own, with the four cases over them",
        ("e2e/durable_topics::everything_sent_is_read_and_delivered_to_each_channel", FOUR_CASES),
    ),
    "T6": Row(
        "sudden joins of very many devices",
        (
            "e2e/edges::a_storm_of_clients_is_let_in_at_the_rate_and_told_so",
            "gateway/admission::an_honest_client_gets_in_during_a_storm_of_half_open_connections",
        ),
    ),
}


@pytest.mark.parametrize("number", ROWS)
def test_the_row_has_its_tests_or_a_reason(number: str) -> None:
    row = ROWS[number]
    assert row.proofs or row.reason
    assert not missing(row.proofs)


def test_every_row_of_both_articles_is_there() -> None:
    assert set(ROWS) == {*(f"Z{number}" for number in range(1, 32)), *(f"T{number}" for number in range(1, 7))}
