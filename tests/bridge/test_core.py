"""The core of a bridge to a target: batches, retries, order, dead letters, pauses."""

from __future__ import annotations

from collections.abc import Sequence

from bridge import events as ev
from bridge.connector import DONE, Outcome, Verdict
from bridge.core import HALVE_AFTER, LEAVE_AFTER_S, SUSPECT_TRIES, Core, Limits, State
from cluster.core.contract import END_OF_TURN, NEVER, TICK

AGAIN = Outcome(Verdict.AGAIN, "busy")
SPLIT = Outcome(Verdict.SPLIT, "wrong")
DEAD = Outcome(Verdict.NEVER, "too large")


class Bench:
    """A core whose target is open and whose channel is joined."""

    def __init__(self, **limits: float | bool) -> None:
        self.lost = set[int]()
        self.core = Core(Limits(**limits), lambda number: number not in self.lost, lambda: 1.0)  # type: ignore[arg-type]
        self.now = 0.0
        assert self.step(ev.Begin()) == [ev.OpenTarget()]
        assert self.step(ev.Opened()) == [ev.Join()]

    def step(self, event: ev.Event) -> list[ev.Effect]:
        return self.core.step(event, self.now)

    def arrive(self, *lanes: int, first: int = 0, size: int = 10) -> list[list[int]]:
        """Messages with the numbers from `first` on; returns the batches that are written."""
        self.step(ev.Arrived([ev.Arrival(first + at, lane, size) for at, lane in enumerate(lanes)]))
        return writes(self.step(END_OF_TURN))

    def tick(self) -> list[list[int]]:
        """At the deadline."""
        assert self.core.next_deadline() < NEVER
        self.now = self.core.next_deadline()
        return writes(self.step(TICK))


def writes(effects: Sequence[ev.Effect]) -> list[list[int]]:
    """The batches that are written."""
    return [list(each.numbers) for each in effects if isinstance(each, ev.Write)]


def test_batches_are_cut_by_count_and_by_bytes_and_one_is_written_at_a_time() -> None:
    bench = Bench(batch_messages=3, batch_bytes=25)
    assert bench.arrive(1, 2, 3, 4, 5) == [[0, 1]]
    effects = bench.step(ev.Written(1, [DONE, DONE]))
    assert effects == [ev.Acknowledge([0, 1]), ev.Write(2, [2, 3])]
    assert bench.core.next_deadline() == NEVER
    assert writes(bench.step(ev.Written(2, [DONE, DONE]))) == [[4]]
    assert bench.step(ev.Written(3, [DONE])) == [ev.Acknowledge([4])]
    assert bench.core.waiting == 0


def test_a_message_larger_than_a_batch_is_written_alone() -> None:
    bench = Bench(batch_bytes=25)
    assert bench.arrive(1, 2, size=100) == [[0]]


def test_a_batch_that_is_not_full_lingers() -> None:
    bench = Bench(batch_messages=3, linger_s=1.0)
    assert bench.arrive(1) == []
    bench.now = 0.5
    assert bench.arrive(2, first=1) == []
    assert bench.core.next_deadline() == 1.0
    assert bench.tick() == [[0, 1]]
    bench.step(ev.Written(1, [DONE, DONE]))
    assert bench.arrive(1, 2, 3, first=2) == [[2, 3, 4]]


def test_lanes_are_never_in_two_batches_of_an_ordered_channel() -> None:
    bench = Bench(batch_messages=2, in_flight=3, ordered=True)
    assert bench.arrive(1, 2, 1, 3, 2, 4) == [[0, 1], [3, 5]]
    assert bench.step(ev.Written(2, [DONE, DONE])) == [ev.Acknowledge([3, 5])]
    assert writes(bench.step(ev.Written(1, [DONE, AGAIN]))) == []
    assert bench.tick() == [[1, 2]]  # 4 waits for 1


def test_what_follows_a_refused_message_of_its_lane_is_written_again_after_it() -> None:
    bench = Bench(ordered=True)
    bench.arrive(1, 2, 1, 2)
    effects = bench.step(ev.Written(1, [AGAIN, DONE, DONE, DONE]))
    assert effects == [ev.Acknowledge([1, 3])]
    assert bench.core.why == "busy"
    assert bench.tick() == [[0, 2]]
    bench.step(ev.Written(2, [DONE, DONE]))
    assert bench.core.why == ""


def test_it_waits_as_long_as_the_target_asks_for_and_longer_each_time() -> None:
    bench = Bench()
    bench.arrive(1)
    bench.step(ev.Written(1, [AGAIN]))
    assert bench.core.next_deadline() == 0.2
    assert bench.tick() == [[0]]
    bench.step(ev.Written(2, [Outcome(Verdict.AGAIN, "later", 30.0)]))
    assert bench.core.next_deadline() == 30.2
    assert bench.tick() == [[0]]
    bench.step(ev.Written(3, [AGAIN]))
    assert bench.core.next_deadline() == 31.0


def test_a_batch_with_something_wrong_in_it_is_halved_until_that_is_alone() -> None:
    bench = Bench(in_flight=1)
    (batch,) = bench.arrive(1, 2, 3, 4, 5)
    letters, written, number = list[tuple[int, str]](), list[int](), 1
    while batch:
        effects = bench.step(ev.Written(number, [SPLIT if 3 in batch else DONE] * len(batch)))
        number += 1
        letters += [letter for each in effects if isinstance(each, ev.Reject) for letter in each.letters]
        written += [each for effect in effects if isinstance(effect, ev.Acknowledge) for each in effect.numbers]
        batch = next(iter(writes(effects)), [])
    assert (letters, sorted(written)) == ([(3, "wrong")], [0, 1, 2, 4])
    assert number < 9


def test_a_message_that_can_never_be_written_holds_up_nothing() -> None:
    bench = Bench(ordered=True)
    bench.arrive(1, 1, 1)
    assert bench.step(ev.Written(1, [DONE, DEAD, DONE])) == [ev.Acknowledge([0, 2]), ev.Reject([(1, "too large")])]


def test_tries_are_limited_if_that_is_wanted_and_only_the_message_itself_is_given_up() -> None:
    bench = Bench(max_tries=2)
    bench.arrive(1, 2)
    bench.step(ev.Written(1, [AGAIN, AGAIN]))
    assert bench.tick() == [[0, 1]]
    bench.step(ev.Written(2, [AGAIN, AGAIN]))
    assert bench.tick() == [[0]]
    effects = bench.step(ev.Written(3, [AGAIN]))
    assert effects == [ev.Reject([(0, "given up after 3 tries: busy")])]
    assert bench.tick() == [[1]]
    assert bench.step(ev.Written(4, [DONE])) == [ev.Acknowledge([1])]


def test_a_target_that_breaks_is_opened_again_and_gets_everything_again() -> None:
    bench = Bench(batch_messages=1, in_flight=2)
    assert bench.arrive(1, 2, 3) == [[0], [1]]
    assert bench.step(ev.WriteFailed(1, "the link was cut")) == [ev.CloseTarget()]
    assert (bench.core.state, bench.core.why) == (State.CLOSED, "the link was cut")
    assert bench.core.next_deadline() == NEVER  # the other write is not over
    assert bench.step(ev.WriteFailed(2, "the link was cut")) == []
    bench.now = bench.core.next_deadline()
    assert bench.step(TICK) == [ev.OpenTarget()]
    assert bench.step(ev.OpenFailed("refused", 5.0)) == [ev.CloseTarget()]
    assert bench.core.next_deadline() == bench.now + 5.0
    bench.now = bench.core.next_deadline()
    assert bench.step(TICK) == [ev.OpenTarget()]
    assert writes(bench.step(ev.Opened())) == [[0], [1]]


def test_a_target_that_is_away_for_long_is_left_to_other_processes() -> None:
    bench = Bench()
    bench.arrive(1, 2)
    bench.step(ev.WriteFailed(1, "away"))
    left = list[ev.Effect]()
    while not left:
        bench.now = bench.core.next_deadline()
        effects = bench.step(TICK)
        left = [each for each in effects if isinstance(each, ev.Leave | ev.Forget)]
        if ev.OpenTarget() in effects:
            bench.step(ev.OpenFailed("away"))
    assert left == [ev.Leave(), ev.Forget([0, 1])]
    assert LEAVE_AFTER_S <= bench.now < LEAVE_AFTER_S + 61.0
    while bench.core.state is State.CLOSED:
        bench.now = bench.core.next_deadline()
        bench.step(TICK)
    assert bench.step(ev.Opened()) == [ev.Join()]


def test_a_week_without_a_target_that_always_opens_costs_few_attempts() -> None:
    bench, leaves, numbers = Bench(), 0, 0
    effects = bench.step(ev.Arrived([ev.Arrival(0, 1, 10)]))
    while bench.now < 7 * 86_400:
        effects += bench.step(END_OF_TURN)
        if not effects:
            bench.now = bench.core.next_deadline()
            effects = bench.step(TICK)
        for each in [*effects]:
            effects.remove(each)
            if isinstance(each, ev.Write):
                effects += bench.step(ev.WriteFailed(each.batch, "away"))
            elif isinstance(each, ev.OpenTarget):
                effects += bench.step(ev.Opened())
            elif isinstance(each, ev.Join):
                numbers += 1
                effects += bench.step(ev.Arrived([ev.Arrival(numbers, 1, 10)]))
            leaves += isinstance(each, ev.Leave)
    assert 10 < leaves < 20


def test_a_pause_waits_for_what_is_being_written() -> None:
    bench = Bench(batch_messages=1)
    assert bench.arrive(1, 2) == [[0]]
    assert bench.step(ev.End()) == []
    effects = bench.step(ev.Written(1, [DONE]))
    assert effects == [ev.Acknowledge([0]), ev.Leave(), ev.Forget([1]), ev.CloseTarget()]
    assert bench.core.idle
    assert bench.core.next_deadline() == NEVER
    assert bench.step(ev.Arrived([ev.Arrival(9, 1, 1)])) == [ev.Forget([9])]
    assert bench.step(ev.Begin()) == [ev.OpenTarget()]


def test_a_pause_while_the_target_is_opened_or_away_ends_at_once() -> None:
    core = Core(Limits(), lambda _number: True, lambda: 1.0)
    assert core.step(ev.Begin(), 0.0) == [ev.OpenTarget()]
    assert core.step(ev.End(), 0.0) == []
    assert core.step(ev.Opened(), 0.0) == [ev.CloseTarget()]
    assert core.idle
    bench = Bench()
    bench.arrive(1)
    bench.step(ev.WriteFailed(1, "away"))
    assert bench.step(ev.End()) == [ev.Leave(), ev.Forget([0])]
    assert bench.core.idle


def test_what_the_channel_took_back_is_not_written() -> None:
    bench = Bench(batch_messages=1)
    bench.arrive(1, 2, 3)
    bench.lost = {1}
    assert bench.step(ev.Written(1, [DONE])) == [ev.Acknowledge([0]), ev.Forget([1]), ev.Write(2, [2])]


def test_a_membership_that_ends_is_begun_again() -> None:
    bench = Bench()
    bench.arrive(1)
    effects = bench.step(ev.MemberFailed("the topic is gone"))
    assert effects == [ev.Leave(), ev.CloseTarget()]
    assert bench.core.next_deadline() == NEVER
    assert bench.step(ev.Written(1, [DONE])) == [ev.Acknowledge([0])]
    assert bench.tick() == []
    assert bench.step(ev.Opened()) == [ev.Join()]


class Cutting(Bench):
    """A target that ends the link at some messages, or at all, and always opens."""

    def __init__(self, *poison: int, **limits: float | bool) -> None:
        super().__init__(**limits)
        self.poison, self.away = frozenset(poison), False
        self.done, self.letters, self.writes = list[int](), list[tuple[int, str]](), 0
        self.effects, self.left = list[ev.Effect](), list[int]()

    def play(self, *, turns: int = 200, lanes: dict[int, int] | None = None, numbers: int = 0) -> None:
        """Do what the core wants; the channel gives again what it took back."""
        for number in range(numbers):
            self.step(ev.Arrived([ev.Arrival(number, (lanes or {}).get(number, number), 10)]))
        effects = self.effects
        effects += self.step(END_OF_TURN)
        for _ in range(turns):
            for each in [*effects]:
                effects.remove(each)
                if isinstance(each, ev.Write):
                    self.writes += 1
                    cut = self.away or self.poison.intersection(each.numbers)
                    effects += self.step(ev.WriteFailed(each.batch, "reset") if cut else
                                         ev.Written(each.batch, [DONE] * len(each.numbers)))  # fmt: skip
                elif isinstance(each, ev.OpenTarget):
                    effects += self.step(ev.Opened())
                elif isinstance(each, ev.Acknowledge):
                    self.done += each.numbers
                elif isinstance(each, ev.Reject):
                    self.letters += each.letters
                elif isinstance(each, ev.Forget):
                    self.left += each.numbers
                elif isinstance(each, ev.Join):
                    effects += self.step(ev.Arrived([ev.Arrival(number, number, 10) for number in sorted(self.left)]))
                    self.left.clear()
                    effects += self.step(END_OF_TURN)
            if not effects and self.core.next_deadline() < NEVER:
                self.now = max(self.now, self.core.next_deadline())
                effects += self.step(TICK)


def test_a_message_at_which_the_target_ends_the_link_is_found_and_holds_up_no_other() -> None:
    for ordered in (False, True):
        bench = Cutting(37, ordered=ordered)
        bench.play(numbers=300)
        assert [number for number, _ in bench.letters] == [37]
        assert "at this message alone" in bench.letters[0][1]
        assert sorted(bench.done) == [number for number in range(300) if number != 37]
        assert bench.writes < 40


def test_several_such_messages_in_one_batch_are_found_each() -> None:
    bench = Cutting(3, 4, 90)
    bench.play(numbers=900, turns=400)
    assert sorted(number for number, _ in bench.letters) == [3, 4, 90]
    assert len(bench.done) == 897


def test_an_outage_makes_no_dead_letters_however_long_it_is_and_the_target_opens_each_time() -> None:
    bench = Cutting()
    bench.away = True
    bench.play(numbers=20, turns=25)
    assert bench.writes >= 8
    assert bench.core.waiting == 20
    bench.away = False
    bench.play(turns=60)
    assert (bench.letters, sorted(bench.done)) == ([], list(range(20)))


def test_a_suspect_that_stays_one_after_an_outage_holds_up_no_other_suspect() -> None:
    bench = Cutting(0, batch_messages=1)
    bench.away = True
    bench.play(numbers=4, turns=24)
    bench.away = False
    bench.play(turns=120)
    assert (bench.letters, sorted(bench.done)) == ([], [1, 2, 3])


def test_an_outage_that_begins_at_a_suspect_does_not_count_against_it() -> None:
    bench = Cutting(7)
    bench.play(numbers=10, turns=60)
    assert (bench.letters, len(bench.done)) == ([], 9)  # there are no others that show that the target is there
    bench.poison = frozenset()
    bench.play(turns=60)
    assert (bench.letters, len(bench.done)) == ([], 10)


def test_what_follows_a_suspect_in_its_lane_waits_for_it() -> None:
    bench = Cutting(0, ordered=True)
    bench.play(numbers=100, lanes={0: 5, 1: 5, 2: 5}, turns=200)
    assert [number for number, _ in bench.letters] in ([], [0])
    assert bench.writes > HALVE_AFTER + SUSPECT_TRIES
    done = [number for number in bench.done if number in (1, 2)]
    assert done == ([1, 2] if bench.letters else [])
