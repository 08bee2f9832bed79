"""A loop that rests: what may wait for the end of a rest, what ends it, and when there is none."""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from cluster.core import pacing
from cluster.core.pacing import MachineLoad, PacedLoop, PacedSelector, new_loop, pacer_of

NEVER_S = 3600.0


def at_rest(now: float) -> float:
    """A machine with nothing to do."""
    return 0.0


def full(now: float) -> float:
    """A machine with no CPU to spare."""
    return 1.0


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Three connections: of a patient one, of another, and of one that is not registered."""
    made = [socket.socketpair() for _ in range(3)]
    yield made
    for pair in made:
        for each in pair:
            each.close()


@pytest.fixture
def pacer(monkeypatch: pytest.MonkeyPatch, pairs: list[Pair]) -> Iterator[PacedSelector]:
    """One that rests from its second call on, for an hour; the first connection is patient."""
    monkeypatch.setattr(pacing, "WINDOW_S", NEVER_S)
    made = PacedSelector(NEVER_S, full)
    made._resting = True
    for reader, _ in pairs[:2]:
        made.register(reader, selectors.EVENT_READ)
    made.be_patient(pairs[0][0])
    assert not made.select(0.001)
    yield made
    made.close()


def ready(pacer: PacedSelector, timeout: float | None = None) -> list[int]:
    return sorted(key.fd for key, _ in pacer.select(timeout))


def test_what_is_patient_waits_for_what_is_not(pacer: PacedSelector, pairs: list[Pair]) -> None:
    (patient, to_patient), (other, to_other), _ = pairs
    to_patient.send(b"x")
    to_other.send(b"x")
    rests = pacer.rests
    assert ready(pacer) == sorted([patient.fileno(), other.fileno()])
    assert pacer.rests == rests + 1


def test_a_timer_ends_a_rest(pacer: PacedSelector, pairs: list[Pair]) -> None:
    (patient, to_patient), _, _ = pairs
    to_patient.send(b"x")
    assert ready(pacer, 0.01) == [patient.fileno()], "what came meanwhile is found"
    assert ready(pacer, 0) == [patient.fileno()], "who does not wait does not rest"


def test_nothing_rests_after_something_for_which_somebody_waits(pacer: PacedSelector, pairs: list[Pair]) -> None:
    (patient, to_patient), _, _ = pairs
    pacer.hurry(time.monotonic() + NEVER_S)
    to_patient.send(b"x")
    rests = pacer.rests
    assert ready(pacer) == [patient.fileno()]
    assert pacer.rests == rests


def test_patience_ends_with_its_socket_and_not_with_its_registration(pacer: PacedSelector, pairs: list[Pair]) -> None:
    patient, to_patient = pairs[0]
    number = patient.fileno()
    pacer.modify(patient, selectors.EVENT_READ | selectors.EVENT_WRITE)
    pacer.unregister(patient)
    pacer.register(patient, selectors.EVENT_READ)
    to_patient.send(b"x")
    assert ready(pacer, 0.01) == [number]
    pacer.unregister(patient)
    patient.close()
    to_patient.close()
    another, to_another = socket.socketpair()
    with another, to_another:
        assert number in (another.fileno(), to_another.fileno()), "its number is given again"
        heir, to_heir = (another, to_another) if another.fileno() == number else (to_another, another)
        pacer.register(heir, selectors.EVENT_READ)
        to_heir.send(b"x")
        assert ready(pacer) == [number], "nobody waits for an hour"
        pacer.unregister(heir)


def test_it_rests_while_it_is_woken_often_and_rests_are_of_use(monkeypatch: pytest.MonkeyPatch, pairs: list[Pair]) -> None:
    monkeypatch.setattr(pacing, "WINDOW_S", 0.0)
    monkeypatch.setattr(pacing, "SAVING", NEVER_S)
    (patient, to_patient), _, _ = pairs
    pacer = PacedSelector(0.2, full)  # longer than a busy machine holds this test up
    pacer.register(patient, selectors.EVENT_READ)
    pacer.be_patient(patient)
    to_patient.send(b"x")
    for _ in range(2):
        assert ready(pacer) == [patient.fileno()]
    assert pacer.rests == 1, "the first wake-up made it rest, as it was one in no time"
    patient.recv(1)
    assert not ready(pacer, 0.01)
    assert not pacer._resting, "a rest behind which there was nothing to do is the last one"
    monkeypatch.setattr(pacing, "WAKES_PER_S", 1e9)
    to_patient.send(b"x")
    monkeypatch.setattr(pacing, "WINDOW_S", 1e-6)
    for _ in range(5):
        assert ready(pacer) == [patient.fileno()]
    assert not pacer._resting, "who is woken seldom does not"
    pacer.close()


def woken_often(monkeypatch: pytest.MonkeyPatch, reader: socket.socket, machine: Callable[[float], float]) -> PacedSelector:
    """A selector that has something to do whenever it is asked, and decides anew each time."""
    monkeypatch.setattr(pacing, "WINDOW_S", 0.0)
    monkeypatch.setattr(pacing, "WAKES_PER_S", 0.0)
    monkeypatch.setattr(pacing, "SAVING", NEVER_S)
    pacer = PacedSelector(0.002, machine)
    pacer.register(reader, selectors.EVENT_READ)
    pacer.be_patient(reader)
    return pacer


def test_a_loop_with_time_to_spare_on_a_machine_with_processors_to_spare_does_not_rest(
    monkeypatch: pytest.MonkeyPatch, pairs: list[Pair]
) -> None:
    (patient, to_patient), *_ = pairs
    pacer = woken_often(monkeypatch, patient, at_rest)
    to_patient.send(b"x")
    for idle_s, rests in ((NEVER_S, False), (-NEVER_S, True), (NEVER_S, False)):
        pacer._idle_s = idle_s  # more than the window: the loop only waited; less than nothing: it never did
        assert ready(pacer) == [patient.fileno()]
        assert pacer._resting is rests
    pacer.close()


def test_a_loop_goes_on_resting_while_the_machine_is_a_quarter_busy(monkeypatch: pytest.MonkeyPatch, pairs: list[Pair]) -> None:
    (patient, to_patient), *_ = pairs
    busy = 0.0
    pacer = woken_often(monkeypatch, patient, lambda _now: busy)
    to_patient.send(b"x")
    for busy, rests in ((0.3, False), (0.6, True), (0.3, True), (0.2, False), (0.3, False)):
        pacer._idle_s = NEVER_S
        assert ready(pacer) == [patient.fileno()]
        assert pacer._resting is rests, busy
    pacer.close()


def test_a_loop_whose_rests_save_no_wake_ups_stops_and_tries_again_later(
    monkeypatch: pytest.MonkeyPatch, pairs: list[Pair]
) -> None:
    (patient, to_patient), *_ = pairs
    pacer = woken_often(monkeypatch, patient, full)
    to_patient.send(b"x")
    pacer.select()
    assert pacer._resting
    monkeypatch.setattr(pacing, "SAVING", 0.75)
    pacer._woken, pacer._rate = 30, 100 / (time.monotonic() - pacer._since + 0.002)
    pacer.select()
    assert pacer._resting, "31 wake-ups of 100 are left"
    pacer._woken, pacer._rate = 1000, 0.001
    pacer.select()
    assert not pacer._resting
    pacer.select()
    assert not pacer._resting, "too soon"
    pacer._not_before = 0.0
    pacer.select()
    assert pacer._resting
    pacer.close()


def test_a_machine_is_as_busy_as_its_processors_were_since_the_last_look() -> None:
    lines = iter(["cpu  100 0 100 700 100 0 0 0 0 0", "cpu  150 0 100 740 110 0 0 0 9 9", "cpu  150 0 110 740 110 0 0 40 9 9", ""])
    load = MachineLoad(lambda: next(lines))
    assert load.share(10.0) == pytest.approx(0.2), "since the machine started"
    assert load.share(10.4) == pytest.approx(0.2), "not asked again so soon"
    assert load.share(10.5) == pytest.approx(0.5)
    assert load.share(11.0) == pytest.approx(1.0), "what a hypervisor takes counts as work"
    assert load.share(12.0) == pytest.approx(1.0), "a system without the file: the last answer stays"


def test_a_paced_loop_is_a_loop(pairs: list[Pair]) -> None:
    (patient, to_patient), _, _ = pairs
    for each in (patient, to_patient):
        each.setblocking(False)

    async def main() -> tuple[bytes, str]:
        loop = asyncio.get_running_loop()
        pacer = pacer_of(loop)
        assert pacer is not None
        pacer.be_patient(patient)
        pacer._resting = True
        received = loop.create_task(loop.sock_recv(patient, 100))
        await asyncio.sleep(0.01)
        await loop.sock_sendall(to_patient, b"hello")
        said = await loop.run_in_executor(None, lambda: "from a thread")
        return await received, said

    with asyncio.Runner(loop_factory=lambda: new_loop(0.005)) as runner:
        assert isinstance(runner.get_loop(), PacedLoop)
        assert runner.run(main()) == (b"hello", "from a thread")
    with asyncio.Runner(loop_factory=lambda: new_loop(0.0)) as runner:
        assert pacer_of(runner.get_loop()) is None
