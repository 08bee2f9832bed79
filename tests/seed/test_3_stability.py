"""Section 3: the delay of messages is measured, and processes that hang are found."""

from __future__ import annotations

import pytest

from tests.seed.index import Sentences, missing

SENTENCES: Sentences = {
    "messages of pseudo users pass every way, and each process stamps them": (
        "tools/probe/paths::every_path_of_the_cluster_is_probed",
        "tools/probe/paths::the_table_has_every_hop_in_order",
        "e2e/probe::the_table_has_every_hop_and_every_path",
    ),
    "a way that fails several times raises an alarm": (
        "tools/probe/paths::the_process_that_failing_paths_have_in_common_is_named",
        "e2e/probe::a_process_that_hangs_is_named_and_the_alarm_ends_with_it",
    ),
    "a fraction of all messages is traced": (
        "pixiu/wire/trace::a_sampler_chooses_about_its_fraction",
        "e2e/probe::a_fraction_of_the_messages_is_traced_into_files",
    ),
    "heartbeats find a process that lives and does nothing": ("e2e/hung::a_hung_process_is_found_and_comes_back_clean",),
    "load is balanced by the delay and success of heartbeats": (
        "pixiu/placement/weights::a_slow_replica_loses_weight_after_some_measurements_that_agree",
        "pixiu/placement/weights::a_replica_that_answers_seldom_loses_weight",
        "e2e/weighted_routing::a_broker_that_is_short_of_cpu_has_less_weight_until_it_is_well_again",
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_has_its_tests(sentence: str) -> None:
    assert SENTENCES[sentence]
    assert not missing(SENTENCES[sentence])
