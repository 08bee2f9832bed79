"""IDs: layouts, the generator's clock rules, names and topics."""

from __future__ import annotations

import itertools

import pytest

from pixiu import ids
from pixiu.errors import LeaseExpired
from pixiu.ids import SnowflakeGenerator
from tests.support.clock import Clock
from tests.support.clock_steps import STEPS_MS


def leased(clock: Clock, span_ms: int = 60_000) -> SnowflakeGenerator:
    generator = SnowflakeGenerator(clock)
    generator.lease(7, clock.now, clock.now + span_ms)
    return generator


def test_a_snowflake_holds_its_time_and_worker_and_leaves_the_top_bit() -> None:
    made = ids.snowflake(ids.SNOWFLAKE_EPOCH_MS + (1 << 41) - 1, 4095, 1023)
    assert made == (1 << 63) - 1
    assert ids.snowflake_time_ms(made) == ids.SNOWFLAKE_EPOCH_MS + (1 << 41) - 1
    assert ids.snowflake_worker(made) == 4095


def test_ids_increase_when_a_millisecond_is_used_up_and_when_the_clock_goes_back() -> None:
    clock = Clock(1_700_000_000_000)
    generator = leased(clock)
    made = [generator.next() for _ in range(3000)]
    clock.now -= 5_000
    made += [generator.next() for _ in range(3000)]
    assert all(a < b for a, b in itertools.pairwise(made))


@pytest.mark.parametrize("step_ms", STEPS_MS)
def test_a_step_of_the_clock_and_back_repeats_no_id_and_stops_none(step_ms: int) -> None:
    clock = Clock(1_700_000_000_000)
    generator = leased(clock, span_ms=24 * 3_600_000)
    made = [generator.next() for _ in range(2000)]
    clock.now += step_ms
    over = clock.now >= generator.until_ms
    assert generator.usable() is (generator.why_not() == "") is not over
    if over:
        with pytest.raises(LeaseExpired):
            generator.next()
    else:
        made += [generator.next() for _ in range(2000)]
    clock.now -= step_ms
    made += [generator.next() for _ in range(2000)]  # also where the time of the lease was over meanwhile
    assert all(a < b for a, b in itertools.pairwise(made))


def test_a_clock_before_2020_makes_no_id_and_the_text_says_so() -> None:
    clock = Clock(ids.SNOWFLAKE_EPOCH_MS - 1)
    generator = leased(clock)
    with pytest.raises(LeaseExpired, match="before 2020: set it"):
        generator.next()
    assert (generator.usable(), "before 2020" in generator.why_not()) == (False, True)
    clock.now += 1
    assert ids.snowflake_time_ms(generator.next()) == ids.SNOWFLAKE_EPOCH_MS


def test_no_id_is_made_at_or_after_the_end_of_the_lease() -> None:
    clock = Clock(1_700_000_000_000)
    generator = leased(clock, span_ms=2)
    made = [generator.next() for _ in range(2048)]
    with pytest.raises(LeaseExpired, match="worker number 7"):
        generator.next()
    assert max(ids.snowflake_time_ms(i) for i in made) < generator.until_ms


def test_a_successor_of_a_worker_number_never_repeats_a_time() -> None:
    clock = Clock(1_700_000_000_000)
    first = leased(clock)
    last = first.next()
    clock.now -= 1_000
    second = SnowflakeGenerator(clock)
    second.lease(7, first.last_used_ms + 1, first.last_used_ms + 60_000)
    assert second.next() > last


def test_a_renewed_lease_goes_on() -> None:
    clock = Clock(1_700_000_000_000)
    generator = leased(clock, span_ms=1)
    before = generator.next()
    clock.now += 10
    generator.lease(7, clock.now - 10, clock.now + 60_000)
    assert generator.next() > before


def test_a_gateway_message_id_holds_instance_generation_and_counter() -> None:
    made = ids.gateway_msg_id(32_767, 1023, (1 << 38) - 1)
    assert made == (1 << 63) - 1
    assert ids.gateway_instance(made) == 32_767
    assert ids.gateway_generation(made) == 1023


@pytest.mark.parametrize("lane", range(4))
def test_a_mails_lane_is_the_top_of_its_type(lane: int) -> None:
    made = ids.msg_id(127, lane << 6 | 63, (1 << 48) - 1)
    assert ids.msg_lane(made) == lane
    assert ids.msg_type(made) >> 6 == lane


@pytest.mark.parametrize(("name", "uin"), [("7", 7), (str((1 << 63) - 1), (1 << 63) - 1)])
def test_a_decimal_name_is_the_uin(name: str, uin: int) -> None:
    assert ids.uin_of_name(name) == uin


@pytest.mark.parametrize("name", ["0", "-1", "anna", "９", str(1 << 63), ""])
def test_any_other_name_is_hashed_below_2_to_the_63(name: str) -> None:
    assert 0 <= ids.uin_of_name(name) < 1 << 63
    assert ids.uin_of_name(name) == ids.uin_of_name(name)


def test_topics_with_one_first_level_share_a_room_above_every_business_room() -> None:
    assert ids.topic_room("home/kitchen") == ids.topic_room("home/hall") == ids.topic_room("home")
    assert ids.topic_room("home") != ids.topic_room("work")
    assert ids.MAX_ROOM < ids.topic_room("home") <= ids.MAX_ID
