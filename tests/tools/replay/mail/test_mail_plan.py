"""When mail is sent and users are there: the same for the same seed, the share of the time that was asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pixiu.errors import ConfigurationError, InvalidArgument
from tools.replay.inbox import Mention
from tools.replay.mail import plan as mail_plan
from tools.replay.mail.plan import MailSchedule, make_mail_plan


def mentions(count: int, users: int = 5) -> list[Mention]:
    return [Mention(1000 * n, n, "r", f"s{n % 3}", f"u{n % users}") for n in range(count)]


def test_letters_keep_the_logs_order_and_its_time_at_another_speed() -> None:
    plan = make_mail_plan(mentions(11), MailSchedule(seconds=5.0))
    assert [letter.at_s for letter in plan.letters] == [number * 0.5 for number in range(11)]
    assert plan.letters[3].text == b"r:3 @u3"
    assert plan.names.user_names[plan.letters[3].to] == "u3"
    assert (len(plan.stays), plan.senders) == (5, 3)
    assert make_mail_plan(mentions(1), MailSchedule()).letters[0].at_s == 0


@pytest.mark.parametrize("online", [0.05, 0.1, 0.5, 0.9, 1.0])
def test_users_are_there_for_their_share_of_the_time(online: float) -> None:
    schedule = MailSchedule(seconds=600.0, online=online, cycle_s=30.0)
    plan = make_mail_plan(mentions(200, users=100), schedule)
    for stays in plan.stays.values():
        assert all(stay.begin_s < stay.end_s for stay in stays)
        assert all(before.end_s < after.begin_s for before, after in pairwise(stays)), "apart from each other"
        assert stays[-1].end_s <= 600.0 + 1e-6
    there = sum(stay.end_s - stay.begin_s for stays in plan.stays.values() for stay in stays)
    assert there == pytest.approx(online * 600 * 100, rel=0.1)


def test_the_seed_decides_when_and_each_user_comes_at_its_own_time() -> None:
    one, same, other = (make_mail_plan(mentions(50), MailSchedule(seed=seed)) for seed in (1, 1, 2))
    assert one.stays == same.stays
    assert one.stays != other.stays
    assert len({stays[0] for stays in one.stays.values()}) == 5


@pytest.mark.parametrize(
    "wrong", [{"online": 0.0}, {"online": 1.1}, {"seconds": 0.0}, {"cycle_s": -1.0}, {"cycle_s": float("inf")}]
)
def test_a_wrong_schedule_names_its_option(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        make_mail_plan(mentions(3), MailSchedule(**wrong))  # type: ignore[arg-type]


def test_a_log_without_mail_and_one_with_too_many_stays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="no mentions"):
        make_mail_plan([], MailSchedule())
    monkeypatch.setattr(mail_plan, "MAX_STAYS", 9)
    with pytest.raises(InvalidArgument, match="a longer --cycle"):
        make_mail_plan(mentions(10), MailSchedule(seconds=60, cycle_s=30))
