"""Section 6.1: Xiu stores messages under IDs that it gives."""

from __future__ import annotations

import pytest

from pixiu.ids import msg_id, msg_partition, msg_sequence, msg_type
from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "a message of another partition is refused": ("xiu/store::not_yet_gone_and_wrong_partition_are_told_apart",),
    "a message that was stored before gets the ID that it has": (
        "xiu/state::a_repeat_gets_the_same_msgid_and_another_crc_is_refused",
        "xiu/core::a_repeat_gets_its_msgid_and_a_reused_id_an_error",
    ),
    "a MsgID is a byte of partition, a byte of type and six of a sequence": (
        "xiu/state::a_msgid_names_partition_type_and_sequence",
        "xiu/state::sequences_are_dense_and_hold_the_epoch",
    ),
    "messages are in a table in shared memory, with their CRC; the one used longest ago makes space": (
        "xiu/table::the_block_used_longest_ago_makes_space",
        "xiu/table::a_flipped_byte_is_found_and_the_block_is_dropped",
    ),
    "a restart takes over what is in shared memory": (
        "xiu/table::a_restart_takes_over_what_is_whole_and_hands_back_what_is_not_persisted",
    ),
    "messages are persisted asynchronously, and never another than was stored": (
        "xiu/core::records_are_in_the_table_when_accepted_and_in_the_store_when_committed",
        "xiu/store::a_block_that_is_wrong_where_rocksdb_sees_nothing_is_found_by_our_crc",
    ),
    "a read takes the table first, then the store": ("xiu/store::reading_takes_the_table_first",),
    "only the leader takes writes": ("xiu/core::a_follower_refuses_writers_and_applies_what_commits",),
    "a follower takes over from a leader that is gone (chosen from those in sync, not by the smallest ID)": (
        "cluster/replication/leadership::only_a_member_of_the_in_sync_set_is_promoted",
        "xiu/xiu_process::two_replicas_lose_nothing_when_the_leader_is_killed_again_and_again",
    ),
    "a follower that is too far behind takes the whole state": (
        "cluster/replication/core::a_follower_behind_the_oldest_kept_entry_gets_a_snapshot",
        "xiu/xiu_process::a_new_replica_takes_a_snapshot_and_a_damaged_store_is_filled_again",
    ),
    "a new leader never gives an ID again (by an epoch in the sequence, not by a jump)": (
        "xiu/state::what_was_decided_and_cut_off_is_forgotten",
        "xiu/xiu_process::kill_9_again_and_again_loses_nothing_acknowledged_and_repeats_no_msgid",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])


def test_a_msgid_finds_its_partition_whatever_the_number_of_partitions_is() -> None:
    """Therefore Xiu needs to move nothing when it doubles."""
    identity = msg_id(3, 0x40, 99)
    assert (msg_partition(identity), msg_type(identity), msg_sequence(identity)) == (3, 0x40, 99)
    assert identity.to_bytes(8, "big") == bytes((3, 0x40)) + (99).to_bytes(6, "big")
