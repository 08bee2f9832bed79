"""Swift: parts of a topic, the protocol of writing, admin and brokers."""

from __future__ import annotations

import pytest

from tests.seed.index import Row, Rows, missing

ROWS: Rows = {
    "W1": Row(
        "a million messages a second come in, and are seen within milliseconds",
        ("e2e/topic_group::reads_wait_and_members_learn_of_the_end_of_a_part",),
        "Rates and delays are measured, not tested: no test asserts a time (benchmarks/cores/topic_core.py).",
    ),
    "W2": Row(
        "storage is apart from computing, so that a machine's disks hold nobody",
        (
            "e2e/topic_store::what_the_store_has_is_neither_kept_nor_copied_and_is_read_by_the_next_leader",
            "topic/offload/reading::everything_is_read_as_if_it_were_here",
            "topic/offload/plan::files_may_go_once_the_store_has_what_is_in_them_and_it_is_old",
        ),
        "For topics with a store; what is written last is on the disks of the group's replicas.",
    ),
    "W3": Row(
        "workers have no state but logs: the registry has the system's, a distributed file system the messages",
        (
            "admin/core_random::registry_and_groups_agree_in_the_end",
            "e2e/topic_store::what_the_store_has_is_neither_kept_nor_copied_and_is_read_by_the_next_leader",
            "sim/topics/fenced_manifests::the_newest_manifest_is_what_the_log_had",
        ),
        "The registry has the system's state, as there; closed segments are in the object store, and the end of a part on disks.",
    ),
    "W4": Row(
        "workers are equal, and more of them are more capacity",
        (
            "registry/layout_change::topic_gets_further_groups_and_none_is_taken_away",
            "pixiu/placement/slots::a_split_a_merge_and_a_move",
            "sim/topics/topics_under_faults::everything_confirmed_is_read_once_and_in_order",
            "admin/balance::a_new_group_gets_its_share_of_parts_without_any_load",
            "admin/core::the_admin_moves_a_part_by_load_and_then_lets_both_groups_rest",
        ),
        "Parts move by themselves once `admin.moves_per_hour` is set; else when an operator says so.",
    ),
    "W5": Row(
        "client and server make it reliable together",
        (
            "sim/topics/topics_under_faults::everything_confirmed_is_read_once_and_in_order",
            "e2e/durable_topics::a_leader_that_is_killed_loses_nothing_and_repeats_no_acknowledged_message",
        ),
    ),
    "W6": Row(
        "many admins, one of which leads, and brokers",
        (
            "registry/topics::one_leads_and_another_takes_over",
            "registry/topics::a_deposed_admin_writes_nothing",
            "e2e/topic_admin::an_admin_that_is_killed_is_replaced_and_its_changes_end",
        ),
        "Processes are started by `pixiu up`, systemd or whatever schedules containers, not by the admin.",
    ),
    "W7": Row(
        "the admin makes, changes and removes topics, places their parts, and clients learn where they are",
        (
            "e2e/topic_admin::topics_are_made_changed_and_removed",
            "e2e/topic_commands::a_topic_from_its_making_to_its_removal",
            "admin/core_random::registry_and_groups_agree_in_the_end",
            "admin/core_random::all_clients_of_the_last_admin_are_answered",
            "proxy/topics_cache::the_last_result_stays_while_the_registry_is_away",
        ),
        "The number of groups is changed with the layout (`pixiu add-replica`), not by the admin.",
    ),
    "W8": Row(
        "a broker writes and reads its parts, and removes what has expired",
        (
            "e2e/topic_group::blocks_are_written_read_and_consumed",
            "e2e/topic_group::retention_drops_segments_and_says_so",
            "topic/storage/store::retention_goes_by_time_and_by_size_in_whole_segments",
        ),
    ),
    "W9": Row(
        "a topic has 65,536 logical partitions, ranges of which are stored together; users give a key or a number",
        (
            "pixiu/placement/slots::every_slot_has_one_line_of_parts",
            "pixiu/placement/slots::the_slot_of_a_key_is_fixed",
            "e2e/durable_topics::everything_sent_is_read_and_delivered_to_each_channel",
        ),
    ),
    "W10": Row(
        "a message goes to the writer of the part that has its range, which appends synchronously or not",
        (
            "pixiu/client/topics/writer_core::everything_is_stored_once_and_in_the_order_of_its_slot",
            "topic/core::slots_of_another_part_are_refused",
            "topic/core::lower_levels_are_answered_once_and_earlier",
        ),
    ),
    "W11": Row(
        "the number of parts changes while the topic is used; parts are placed by load",
        (
            "e2e/durable_topics::a_resize_keeps_the_order_of_each_key_for_writers_members_and_readers",
            "sim/topics/topics_under_faults::everything_confirmed_is_read_once_and_in_order",
            "admin/placement::new_parts_go_where_there_is_most_room",
            "admin/balance::moves_end_and_none_is_undone_though_measurements_are_off",
            "e2e/topic_commands::a_topic_from_its_making_to_its_removal",
        ),
        "A part that is hot is not split by itself.",
    ),
    "W12": Row(
        "a message can be stored in the distributed file system before it is confirmed",
        (
            "topic/core::a_block_is_answered_when_it_is_applied",
            "topic/core::with_too_few_disks_the_outcome_is_unknown",
            "topic/stored::a_block_is_answered_when_the_store_has_it",
            "e2e/topic_store::what_the_store_has_is_neither_kept_nor_copied_and_is_read_by_the_next_leader",
        ),
        "Level `stored`; the default is `replicated`, on every disk in sync.",
    ),
    "W13": Row(
        "answers carry the triple of version, load time and checkpoint; a client that knows an old version is refused",
        (
            "topic/core::a_block_is_answered_when_it_is_applied",
            "topic/core::admin_is_answered_with_what_the_log_made_of_it",
            "e2e/topic_group::reads_wait_and_members_learn_of_the_end_of_a_part",
        ),
        "A writer sends no version: a sealed part refuses its blocks and names the children, so V needs no comparison.",
    ),
    "W14": Row(
        "what was sent, accepted and persisted are known apart, and what is persisted stays in memory until space is short",
        (
            "pixiu/client/topics/writer_core::a_flush_lets_messages_leave_without_waiting_for_others",
            "topic/core::lower_levels_are_answered_once_and_earlier",
            "topic/storage/cache::memory_is_bounded_and_what_was_used_stays",
        ),
    ),
    "W15": Row(
        "after a part has moved, the client sends again, in order, what is not confirmed [and nothing is stored twice]",
        (
            "pixiu/client/topics/writer_core::everything_is_stored_once_and_in_the_order_of_its_slot",
            "pixiu/client/topics/writer_core::what_was_confirmed_at_a_lower_level_and_lost_does_not_hold_up_what_follows",
            "topic/core::a_repeated_block_is_answered_with_its_offset",
            "sim/topics/topics_under_faults::everything_confirmed_is_read_once_and_in_order",
        ),
    ),
    "W16": Row(
        "a client without new messages asks for the checkpoint with an empty write [each block is answered at its level, unasked]",
        (
            "topic/core::lower_levels_are_answered_once_and_earlier",
            "topic/core::a_lost_office_leaves_outcomes_unknown_and_members_to_the_next",
        ),
        "A writer at a lower level is not told later that its messages are replicated; it chooses that level to be told.",
    ),
    "W17": Row(
        "a rising number of the user's own says up to where messages are stored",
        (
            "pixiu/client/topics/writer_core::a_named_writer_that_restarts_stores_nothing_twice",
            "pixiu/client/topics/writer_core::progress_has_to_rise",
            "pixiu/client/topics/writer_core::progress_of_a_merged_part_is_that_of_each_parent",
            "e2e/durable_topics::a_loader_that_is_killed_and_starts_again_stores_every_row_once",
        ),
    ),
    "W18": Row(
        "flush: in the memory of client and broker, lost only if both die [level `accepted`]",
        (
            "topic/core::a_turn_of_lower_levels_needs_no_other_replica",
            "pixiu/client/topics/writer_core::a_flush_lets_messages_leave_without_waiting_for_others",
        ),
        "A client forgets what was accepted: it is lost with the leader. A level of all replicas' memories is not built.",
    ),
    "W19": Row(
        "all parts share one buffer of writes and one cache of files; cold parts cost nothing",
        (
            "topic/storage/cache::memory_is_bounded_and_what_was_used_stays",
            "topic/storage/store::a_thousand_parts_share_a_group",
        ),
    ),
    "W20": Row(
        "readers read memory, and do not see that the file system is slow or away",
        (
            "topic/storage/store::unwritten_blocks_are_read_from_memory",
            "topic/storage/store::while_nothing_can_be_flushed_memory_serves",
            "e2e/topic_store::while_the_store_is_away_writers_go_on_until_space_is_short",
            "topic/offload/reading::a_store_that_is_away_is_no_gap",
        ),
        "Memory keeps `topic.memory_mb`; behind it are local files, ten minutes of what is uploaded and all that is not.",
    ),
    "W21": Row(
        "a machine has many brokers, and a process several parts of a topic",
        (
            "topic/storage/store::a_thousand_parts_share_a_group",
            "e2e/topic_group::reads_wait_and_members_learn_of_the_end_of_a_part",
        ),
    ),
    "W22": Row(
        "memory first, then the file system, for writes and for reads",
        (
            "topic/storage/store::unwritten_blocks_are_read_from_memory",
            "topic/storage/store::a_store_on_the_disk_is_read_again",
            "topic/storage/power_cut::nothing_is_lost_and_nothing_is_twice",
        ),
    ),
    "W23": Row(
        "brokers find their tasks in the registry, and say what they have loaded [the admin asks groups' leaders for both]",
        (
            "admin/core_random::registry_and_groups_agree_in_the_end",
            "e2e/topic_admin::an_admin_that_is_killed_is_replaced_and_its_changes_end",
            "admin/core::a_plan_waits_for_all_groups_and_moves_nothing",
        ),
    ),
    "W24": Row(
        "a writer has two buffers, and waits until everything was sent, or finished",
        (
            "pixiu/client/topics/writer_core::a_message_leaves_at_once_and_those_after_it_share_a_block",
            "pixiu/client/topics/writer_core::a_flush_lets_messages_leave_without_waiting_for_others",
            "e2e/durable_topics::everything_sent_is_read_and_delivered_to_each_channel",
        ),
    ),
    "W25": Row(
        "a reader is in order within a part, and merges parts by the time of their messages [by the order of arrival, in batches]",
        (
            "pixiu/client/topics/reader_core::a_reader_that_goes_on_at_its_position_misses_and_repeats_nothing",
            "pixiu/client/topics/reader_core::children_wait_for_all_of_their_parents",
            "e2e/durable_topics::a_resize_keeps_the_order_of_each_key_for_writers_members_and_readers",
        ),
        "Parts are not merged by time: no order between parts is promised there either.",
    ),
    "W26": Row(
        "aside: filters by fields, sealed topics, long polls, compression, mirrors",
        (
            "pixiu/wire/filters::messages_match_as_the_conditions_say",
            "topic/state/state::a_seal_ends_a_part_and_names_its_children",
            "e2e/topic_group::reads_wait_and_members_learn_of_the_end_of_a_part",
        ),
        "Compression and mirrors in another cluster are not built.",
    ),
}


@pytest.mark.parametrize("number", ROWS)
def test_the_row_has_its_tests_or_a_reason(number: str) -> None:
    row = ROWS[number]
    assert row.proofs or row.reason
    assert not missing(row.proofs)
